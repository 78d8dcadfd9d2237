"""Low-rank adapters in PEFT's format: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_core.checkpoint.writer import write_safetensors
from megatron_core.config import ModelConfig
from megatron_core.config.tuning import NAMES, TuningConfig
from megatron_core.errors import CheckpointError
from megatron_core.models.hf.architecture import Architecture
from megatron_core.models.hf.files import TensorFiles, read_json
from megatron_core.models.hf.tensors import TensorSource
from megatron_core.parallel.texts import listed

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
ONLY: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    **dict.fromkeys(("modules_to_save", "rank_pattern", "alpha_pattern", "layer_replication"), (None, {}, [])),
    **dict.fromkeys(("layers_to_transform", "target_parameters", "trainable_token_indices"), (None, [])),
    **dict.fromkeys(("lora_bias", "use_qalora", "alora_invocation_tokens", "use_bdlora"), (None, False)),
}
"""Keys of adapter_config.json and their supported values; the first one is the default."""
KINDS = {"lora_A": "lora_A.weight", "lora_B": "lora_B.weight", "magnitude": "lora_magnitude_vector"}
"""Our kinds of tensors -> theirs."""
_OURS = re.compile(r"(decoder\.layers\.\d+\..+)\.adapter\.(lora_A|lora_B|magnitude)\.(\w+)")
_THEIRS = re.compile(rf"{re.escape(PREFIX)}(.+)\.(lora_A\.weight|lora_B\.weight|lora_magnitude_vector)")

OF_PATHS = {"self_attn.out_proj": "linear_proj", "attn.out_proj": "linear_proj"}
"""Ends of paths in stored models whose last name is that of another layer here -> name in --lora-target-modules."""


def target_of(module: str) -> str:
    """The name in --lora-target-modules of a module of a stored model."""
    end = ".".join(module.split(".")[-2:])
    return OF_PATHS.get(end, end.rpartition(".")[2])


def adapter_settings(folder: Path) -> dict[str, Any]:
    """The flat settings of a run that trains the adapters in ``folder``.

    Errors: ``CheckpointError`` for kinds of adapters that are not supported.
    """
    found = read_json(folder / CONFIG)
    for key, values in ONLY.items():
        if (value := found.get(key, values[0])) not in values:
            raise CheckpointError(f"{folder / CONFIG} says {key}={value!r}; only {values[0]!r} is supported")
    try:
        settings = {
            "lora_rank": int(found["r"]),
            "lora_alpha": float(found["lora_alpha"]),
            "lora_dropout": float(found.get("lora_dropout") or 0.0),
            "use_rslora": bool(found.get("use_rslora", False)),
            "use_dora": bool(found.get("use_dora", False)),
        }
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder / CONFIG}: r and lora_alpha must be numbers ({error}); copy it again") from None
    files = TensorFiles(folder, WEIGHTS)
    try:
        modules = {target_of(match[1]) for match in map(_THEIRS.fullmatch, files.names) if match}
    finally:
        files.close()
    unknown = sorted(modules - NAMES.keys())
    if unknown or not modules:
        raise CheckpointError(
            f"{folder / WEIGHTS} has adapters of {listed(unknown) or 'no layer'}; supported are linear layers of "
            "attention and MLP, such as q_proj and down_proj"
        )
    return settings | {"lora_target_modules": tuple(sorted(modules))}


@dataclass(frozen=True)
class Place:
    """A stored adapter as a part of one of ours."""

    module: str
    """Its module in the Hugging Face model."""
    positions: Tensor
    """For each of its rows, the row of our B."""
    expert: int | None = None


@dataclass(frozen=True)
class PeftNames:
    """Correspondence of our adapters and PEFT's for the model ``model`` of an architecture.

    ``shapes`` are the global shapes of our frozen weights by name.
    """

    architecture: Architecture
    model: ModelConfig
    shapes: Mapping[str, tuple[int, ...]]
    rows_of: Callable[[str, str], tuple[tuple[int, int], ...]]
    """The rows of our weight (name of the layer, part of it) that an adapter covers."""

    def places(self, layer: str, part: str) -> list[Place]:
        """The stored adapters that make up the adapter of a part of ``layer``."""
        shape, source = self.shapes[f"{layer}.weight"], self.architecture.source(f"{layer}.weight")
        if source.stacked:
            raise CheckpointError(
                f"{self.architecture.model_type} stores the matrices of all experts in one tensor, {source.names[0]}, "
                "for which PEFT's format has no adapters; name only other layers in --lora-target-modules"
            )
        if len(shape) == 3:
            return [
                place
                for expert in range(shape[0])
                for place in self._places(layer, part, source.of_expert(expert), shape[1:], expert)
            ]
        return self._places(layer, part, source, shape, None)

    def _places(
        self, layer: str, part: str, source: TensorSource, shape: tuple[int, ...], expert: int | None
    ) -> list[Place]:
        position, at = torch.full((shape[0],), -1), 0
        for start, stop in self.rows_of(layer, part):
            position[start:stop] = torch.arange(at, at + stop - start)
            at += stop - start
        found = []
        for name, rows in source.rows_by_name(self.model, shape[0]).items():
            positions = position[torch.tensor(rows)]
            if (positions >= 0).all():
                found.append(Place(name.removesuffix(".weight"), positions, expert))
            elif (positions >= 0).any():
                raise CheckpointError(
                    f"{self.architecture.model_type} stores {name} as one matrix, of which {layer} has an adapter for "
                    f"the part {part!r} only; name the whole matrix in --lora-target-modules"
                )
        return found


def parsed(name: str) -> tuple[str, str, str]:
    """The layer, the kind of tensor and the part of the weight in the name of an adapter's parameter."""
    match = _OURS.fullmatch(name)
    assert match is not None, f"{name} is the name of an adapter"
    return match[1], match[2], match[3]


def read_adapter(folder: Path, names: PeftNames, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Our adapters of the global ``shapes`` from a folder in PEFT's format.

    Errors: ``CheckpointError`` if it has not exactly these adapters.
    """
    files, used = TensorFiles(folder, WEIGHTS), set()
    try:
        found: dict[str, Tensor] = {}
        for name, shape in shapes.items():
            layer, kind, part = parsed(name)
            tensor: Tensor | None = None
            for place in names.places(layer, part):
                stored = f"{PREFIX}{place.module}.{KINDS[kind]}"
                if stored not in files.names:
                    raise CheckpointError(f"{folder / WEIGHTS} has no {stored}; give the settings in {CONFIG}")
                used.add(stored)
                values = files.read(stored, (slice(None),))
                tensor = torch.full(shape, float("nan"), dtype=values.dtype) if tensor is None else tensor
                own = tensor if place.expert is None else tensor[place.expert]
                _place(own, values, place, kind, stored)
            assert tensor is not None, "every layer is stored"
            found[name] = tensor
        if left := sorted(files.names - used):
            raise CheckpointError(f"{folder / WEIGHTS} also has {listed(left)}; name these layers, too")
        return found
    finally:
        files.close()


def _place(ours: Tensor, values: Tensor, place: Place, kind: str, stored: str) -> None:
    """Copy a stored tensor to its part of ours; A of several stored matrices must be the same."""
    wanted = ours.shape if kind == "lora_A" else (len(place.positions), *ours.shape[1:])
    if values.shape != wanted:
        raise CheckpointError(f"{stored} has the shape {list(values.shape)}, this run needs {list(wanted)}")
    if kind != "lora_A":
        ours[place.positions] = values
    elif ours.isnan().any() or torch.equal(ours, values):
        ours.copy_(values)
    else:
        raise CheckpointError(
            f"{stored} differs from that of another matrix of the same fused weight; name its parts, such as q_proj "
            "k_proj v_proj, in --lora-target-modules"
        )


def write_adapter(
    folder: Path, names: PeftNames, tensors: Mapping[str, Tensor], tuning: TuningConfig, base: str | None
) -> None:
    """Write our adapters into ``folder`` in PEFT's format; ``base`` is the folder or name of the model."""
    stored = dict(_stored(names, tensors))
    entries = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in stored.items()]
    write_safetensors(folder / WEIGHTS, entries, stored.values(), {"format": "pt"})
    modules = {match[1].rpartition(".")[2] for match in map(_THEIRS.fullmatch, stored) if match}
    content = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": tuning.lora_rank,
        "lora_alpha": tuning.lora_alpha,
        "lora_dropout": tuning.lora_dropout,
        "target_modules": sorted(modules),
        "use_rslora": tuning.use_rslora,
        "use_dora": tuning.use_dora,
        "bias": "none",
        "fan_in_fan_out": any(names.architecture.source(f"{parsed(n)[0]}.weight").transposed for n in tensors),
        "inference_mode": True,
    }
    (folder / CONFIG).write_text(json.dumps(content, indent=2) + "\n")


def _stored(names: PeftNames, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors.items():
        layer, kind, part = parsed(name)
        for place in names.places(layer, part):
            own = tensor if place.expert is None else tensor[place.expert]
            yield f"{PREFIX}{place.module}.{KINDS[kind]}", own if kind == "lora_A" else own[place.positions]
