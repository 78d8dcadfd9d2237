"""A Megatron-LM checkpoint of any layout, with the interface of ``CheckpointReader``."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from math import prod
from pathlib import Path
from typing import Any

import torch

from megatron_core.checkpoint import TensorBox
from megatron_core.checkpoint.manifest import WEIGHT_DTYPES
from megatron_core.checkpoint.state_reader import StateReader
from megatron_core.config import ModelConfig
from megatron_core.config.run import core_sections, field_types
from megatron_core.errors import CheckpointError, quoted
from megatron_core.features.sparse_attention.settings import SparseAttentionConfig
from megatron_core.hub.megatron_lm.arguments import REMEDY, MegatronProgress, optimizer_step, settings_of_arguments
from megatron_core.hub.megatron_lm.fsdp_files import open_distributed
from megatron_core.hub.megatron_lm.rank_files import RankFiles
from megatron_core.hub.megatron_lm.tensor_map import (
    FROZEN,
    TIED,
    TensorPart,
    TensorParts,
    check_delta_nets,
    whole_shape,
    with_offsets,
)
from megatron_core.parallel.texts import listed
from megatron_core.text_file import read_text

MOMENTS = ("exp_avg", "exp_avg_sq")
TRACKER = "latest_checkpointed_iteration.txt"
VERSION = 3.0
"""Version of the checkpoints that are read; earlier ones have other orders of the rows of Q, K and V."""


class MegatronReader(StateReader):
    """Weights and Adam state of one iteration of Megatron-LM; a context manager.

    Formats: ``torch``, ``torch_dist`` and ``fsdp_dtensor``.

    ``folder`` is Megatron-LM's ``--save`` folder or one iteration in it. No code that the files name is executed.
    The two matrices over the vocabulary may have further rows, which pad the vocabulary to a divisible size.
    Errors: ``CheckpointError`` for files, settings and tensors that are missing, damaged or not supported.
    """

    def __init__(self, folder: str | Path, step: int | None = None) -> None:
        self.folder = megatron_iteration_folder(Path(folder), step)
        distributed = (self.folder / ".metadata").is_file()
        files = open_distributed(self.folder) if distributed else RankFiles(self.folder)
        version = files.common.get("checkpoint_version", VERSION)
        if version != VERSION:
            raise CheckpointError(
                f"{self.folder}: checkpoint_version is {quoted(version)}; {VERSION}, of Megatron-LM since 2021, is "
                "read. Load and save it with a release of Megatron-LM that writes this version"
            )
        self.arguments = files.arguments
        self.settings = settings_of_arguments(files.arguments)
        names = core_sections()["model"].__dataclass_fields__.keys() & field_types()
        self.model = ModelConfig(**{name: value for name, value in self.settings.items() if name in names})
        check_delta_nets(self.model, self.folder)
        self._parts = with_offsets(files.parts(self.model), self.model)
        self._files = files
        vocabulary = self.settings.get("vocab_size") or self._rows(TIED[0])
        self.state = {"vocab_size": vocabulary}

    def __exit__(self, *_: object) -> None:
        self._parts = {}

    def has(self, name: str, shape: tuple[int, ...] | None = None) -> bool:
        """Whether a weight of that name, and of ``shape`` if given, is stored."""
        tensor_parts = self._parts.get(name.removeprefix("model."))
        return tensor_parts is not None and shape in (None, whole_shape(tensor_parts))

    @torch.no_grad()
    def fill(self, pieces: Iterable[TensorBox]) -> None:
        """Copy the stored values into the memory of each box; dtypes are converted.

        Weights are read from the stored main weights if there are any; main weights from weights if not.
        """
        for piece in pieces:
            filled = 0
            for stored_part in self._stored(piece.name):
                common = piece.box.intersect(stored_part.box)
                if common is None:
                    continue
                values = stored_part.read()
                if values.dtype not in WEIGHT_DTYPES.values():
                    raise CheckpointError(
                        f"{self.folder}: {piece.name} has the dtype {values.dtype}; weights must be "
                        f"{', '.join(WEIGHT_DTYPES)}. Save the model in one of these dtypes: quantized weights are not "
                        "supported"
                    )
                piece.memory[common.within(piece.box)] = values[common.within(stored_part.box)].to(piece.memory)
                filled += common.numel
            if filled != piece.box.numel:
                raise CheckpointError(
                    f"{self.folder}: {filled} of {piece.box.numel} elements of {piece.name} are stored; copy the whole "
                    "checkpoint"
                )

    def _stored(self, name: str) -> list[TensorPart]:
        state_kind, weight = (
            ("main", name.removeprefix("model.")) if name.startswith("model.") else name.split(".", 2)[1:]
        )
        if state_kind != "main":
            return self._optimizer[state_kind].get(weight, [])
        main = self._optimizer["main"] if "main" in self.kinds else {}
        return main.get(weight) or self._parts.get(weight, [])

    @cached_property
    def _optimizer(self) -> dict[str, TensorParts]:
        states = self._files.optimizer_parts(self.model)
        has_step = optimizer_step(self._files.optimizer_counts(), self.schedule) != 0
        if not has_step and states.keys().isdisjoint(MOMENTS):
            # Adam makes its moments in its first update, which a large loss scale of float16 delays.
            states |= dict.fromkeys(MOMENTS, self._zeros())
        return {
            state_kind: with_offsets(tensor_parts, self.model) if state_kind == "main" else tensor_parts
            for state_kind, tensor_parts in states.items()
        }

    def _zeros(self) -> TensorParts:
        trained = {name: parts for name, parts in self._parts.items() if not name.endswith(FROZEN)}
        return {
            name: [TensorPart(part.box, partial(torch.zeros, part.box.shape)) for part in parts]
            for name, parts in trained.items()
        }

    @cached_property
    def kinds(self) -> list[str]:
        """The stored kinds of optimizer state: moments, and main weights if the weights have 16 bits."""
        state_kinds = list(self._optimizer) if self._optimizer.keys() >= {*MOMENTS} else []
        return [state_kind for state_kind in state_kinds if state_kind != "main" or self.dtype_of() != torch.float32]

    @property
    def fault_of_state(self) -> str:
        """Why no optimizer state is found although it is stored; else empty."""
        if self.kinds or not self._files.has_flat_buffers:
            return ""
        return (
            "its flat buffers do not contain the stored weights, because a file is damaged or the parameters have "
            "another order: copy the checkpoint again, save it with --dist-ckpt-optim-fully-reshardable, or"
        )

    @property
    def schedule(self) -> Mapping[str, Any]:
        """The stored schedule of learning rate and weight decay; empty without one."""
        schedule = self._files.common.get("opt_param_scheduler")
        return schedule if isinstance(schedule, Mapping) else {}

    def progress(self) -> MegatronProgress:
        """The position of the training."""
        files = self._files
        return MegatronProgress.of(files.common, files.arguments, files.optimizer_counts(), self.folder)

    def check_names(
        self, needed: Mapping[str, tuple[int, ...]], is_unused: Callable[[str], bool] = lambda name: False
    ) -> None:
        """Compare the stored tensors with the global shapes that a run needs, as ``CheckpointReader`` does."""
        by_kind: dict[str, dict[str, tuple[int, ...]]] = {}
        for name, shape in needed.items():
            state_kind, weight = ("model", name[6:]) if name.startswith("model.") else name.split(".", 2)[1:]
            by_kind.setdefault(state_kind, {})[weight] = shape
        used_parts = {name: tensor for name, tensor in self._parts.items() if not is_unused(f"model.{name}")}
        self._check(by_kind.pop("model", {}), used_parts)
        if (
            by_kind
            and self.kinds
            and self.model.section(SparseAttentionConfig).has_sparse_attention
            and not self.model.section(SparseAttentionConfig).trains_indexers
        ):
            raise CheckpointError(
                f"{self.folder} was trained without a loss of its indexers, whose weights Adam only decayed and which "
                f"are frozen here; {REMEDY}, or train them with --dsa-indexer-loss-coeff"
            )
        for state_kind, ours in by_kind.items():
            if state_kind in self.kinds:
                self._check(ours, self._optimizer[state_kind])

    def check_complete(self, ours: Mapping[str, tuple[int, ...]], kinds: Sequence[str] = ()) -> None:
        """``CheckpointError`` unless the checkpoint has exactly our tensors, by name and shape.

        The same is checked for ``kinds`` of optimizer state, which frozen tensors do not have.
        """
        self._check(ours, self._parts)
        trained = {name: shape for name, shape in ours.items() if not name.endswith(FROZEN)}
        for state_kind in kinds:
            self._check(trained, self._optimizer[state_kind])

    def _check(self, ours: Mapping[str, tuple[int, ...]], tensor_parts: TensorParts) -> None:
        missing = sorted(name for name in ours if not tensor_parts.get(name))
        unused = sorted(set(tensor_parts) - set(ours))
        if missing or unused:
            faults = {"missing": missing, "unexpected": unused}
            listing = "; ".join(f"{fault}: {listed(names)}" for fault, names in faults.items() if names)
            raise CheckpointError(f"{self.folder}: its tensors and its arguments do not agree; {listing}")
        for name, shape in ours.items():
            stored_shape = whole_shape(tensor_parts[name])
            padded = (max(stored_shape[0], shape[0]), *shape[1:]) if name in TIED else shape
            if stored_shape != padded:
                raise CheckpointError(
                    f"{self.folder}: {name} has the shape {list(stored_shape)}, its arguments ask for {list(shape)}"
                )
            stored = sum(box.numel for box in {piece.box for piece in tensor_parts[name]})
            if stored != prod(stored_shape):
                raise CheckpointError(
                    f"{self.folder}: {stored} of {prod(stored_shape)} elements of {name} are stored; copy the "
                    "whole checkpoint"
                )

    def dtype_of(self, name: str = TIED[0]) -> torch.dtype:
        """The dtype of the stored weights."""
        return self._parts[TIED[0]][0].read().dtype

    def _rows(self, name: str) -> int:
        if name not in self._parts:
            raise CheckpointError(f"{self.folder} has no {name}")
        return whole_shape(self._parts[name])[0]


def megatron_iteration_folder(folder: Path, step: int | None) -> Path:
    """The folder of iteration ``step`` in ``folder``, by default the latest; ``folder`` itself if it has its files."""
    if (folder / ".metadata").is_file() or any(folder.glob("mp_rank_*/model_optim_rng.pt")):
        return folder
    try:
        latest = str(step) if step is not None else read_text(folder / TRACKER).strip()
    except (OSError, ValueError):
        raise CheckpointError(f"{folder} has neither {TRACKER} nor the files of an iteration") from None
    is_number = re.fullmatch("[0-9]{1,18}", latest) is not None
    chosen = folder / (f"iter_{int(latest):07d}" if is_number else latest)
    if latest != "release" and not is_number:
        raise CheckpointError(f"{folder / TRACKER} says {quoted(latest)}; it must be an iteration or release")
    if not (chosen / ".metadata").is_file() and not any(chosen.glob("mp_rank_*/model_optim_rng.pt")):
        raise CheckpointError(f"{chosen} has neither .metadata (torch_dist) nor mp_rank_*/model_optim_rng.pt (torch)")
    return chosen
