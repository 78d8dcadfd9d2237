"""The format ``torch`` of Megatron-LM: a file for each model-parallel rank."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_core.config import ModelConfig
from megatron_core.errors import CheckpointError
from megatron_core.features.experts.settings import MoEConfig
from megatron_core.features.latent_attention.settings import LatentAttentionConfig
from megatron_core.features.layer_sizes.settings import HeterogeneousConfig
from megatron_core.hub.megatron_lm.flat_buffers import FlatBuffer, FlatState, bucket_limits, coalesced
from megatron_core.hub.megatron_lm.pickles import load_tensors
from megatron_core.hub.megatron_lm.tensor_map import (
    DOWN,
    EXPERT,
    FROZEN,
    LAYER,
    MODEL,
    LocalSplit,
    Sizes,
    TensorParts,
    has_other_names,
    our_name,
    plain_name,
    rows_of_ranks,
)

CHUNK = re.compile(r"model(\d*)")
OPTIMIZER = "distrib_optim.pt"
Named = dict[tuple[str, str], Tensor]
"""(key of the virtual stage, name) -> tensor."""


class RankFiles:
    """``mp_rank_00_001/model_optim_rng.pt`` of each rank, and ``distrib_optim.pt`` of the distributed optimizer."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = {path.parent.name: path for path in sorted(folder.glob("mp_rank_*/model_optim_rng.pt"))}
        self._content: dict[str, Any] = {}
        first = self._load(next(iter(self._files)))
        arguments = getattr(first.get("args"), "arguments", None)
        if not isinstance(arguments, dict):
            raise CheckpointError(f"{folder} has no arguments of the training, which describe the model")
        self.arguments: Mapping[str, Any] = arguments
        self.common: Mapping[str, Any] = first
        self._sizes = Sizes.of(arguments)
        size = self._sizes
        if size.ep == 1:
            self._sizes = replace(size, etp=size.tp)
        elif size.etp * size.ep < size.tp:
            raise CheckpointError(
                f"{folder}: expert_tensor_parallel_size={size.etp} times expert_model_parallel_size={size.ep} is less "
                f"than tensor_model_parallel_size={size.tp}; Megatron-LM then stores only the first tensor-parallel "
                "ranks. Save with --ckpt-format torch_dist"
            )

    def parts(self, model: ModelConfig) -> TensorParts:
        """All stored parts of our weights by name."""
        return self._parts(model, self._weights)

    def optimizer_parts(self, model: ModelConfig) -> dict[str, TensorParts]:
        """The parts of each kind of Adam's state; empty if the state is absent or its order of parameters unknown."""
        optimizers = self._optimizers(self.common)
        if optimizers and all(optimizer.get("state") for optimizer in optimizers):
            has_main = "fp32_from_fp16_params" in _optimizer_list(self.common.get("optimizer"))[0]
            kinds = ["exp_avg", "exp_avg_sq"] + ["main"] * has_main
            return {name: self._parts(model, partial(self._adam, state_kind=name)) for name in kinds}
        if not self.has_flat_buffers:
            return {}
        return FlatState(model, self._sizes, self.parts(model), self._buffers(), bucket_limits(self.arguments)).parts()

    @property
    def has_flat_buffers(self) -> bool:
        """Whether the optimizer's state is in flat buffers."""
        return any(self.folder.glob(f"mp_rank_*/{OPTIMIZER}"))

    def optimizer_counts(self) -> Any:
        """The optimizer's step and parameter groups."""
        optimizers = _optimizer_list(self.common.get("optimizer"))
        return optimizers[0] if optimizers else None

    def _buffers(self) -> dict[bool, dict[int, list[FlatBuffer]]]:
        """The flat buffers of the distributed optimizer, of dense layers and of experts, by model-parallel rank."""
        by_experts: dict[bool, dict[int, list[FlatBuffer]]] = {False: {}, True: {}}
        size = self._sizes
        for (tp, etp, ep), pp in product(self._saving_ranks(), range(size.pp)):
            path = self._path(tp, pp, ep).with_name(OPTIMIZER)
            content = load_tensors(path) if path.is_file() else []
            ranks = (tp + size.tp * pp, etp + size.etp * (ep + size.ep * pp))
            for of_experts, state in enumerate(content if isinstance(content, list) else [content]):
                if isinstance(state, dict):
                    by_experts[bool(of_experts)].setdefault(ranks[of_experts], coalesced(state))
        return by_experts

    def _parts(self, model: ModelConfig, read: Callable[[Mapping[str, Any]], Named]) -> TensorParts:
        """The parts of the tensors that ``read`` returns from the content of a file."""
        model = model.section(HeterogeneousConfig)
        size = self._sizes
        if groups := [groups for groups in model.all_query_groups if groups % size.tp]:
            raise CheckpointError(
                f"{self.folder}: {groups[0]} key-value groups on {size.tp} tensor-parallel ranks are "
                "supported only with --ckpt-format torch_dist"
            )
        if any(block.is_empty for block in model.blocks) and len(list(self._stages())) > 1:
            raise CheckpointError(
                f"{self.folder} has layers without attention and MLP on several pipeline stages, which is supported "
                "only with --ckpt-format torch_dist: the files do not say on which stage such a layer is"
            )
        tensor_parts: TensorParts = {}
        seen: set[int] = set()
        for ranks in self._saving_ranks():
            tp, _, ep = ranks
            for chunk, pp, before in self._stages():
                for (key, name), tensor in read(self._state(tp, pp, ep)).items():
                    if key == chunk:
                        self._add(tensor_parts, name, tensor, ranks, before, model, is_copy=tp in seen)
            seen.add(tp)
        if model.share_embeddings_and_output_weights:
            tensor_parts.pop("output_layer.weight", None)  # a copy on the last stage
        return tensor_parts

    def _saving_ranks(self) -> Iterator[tuple[int, int, int]]:
        """Ranks in the tensor-, expert-tensor- and expert-parallel group of each rank of a stage that writes a file."""
        size = self._sizes
        for rank in range(size.etp * size.ep):
            yield rank % size.tp, rank % size.etp, rank // size.etp

    def _stages(self) -> Iterator[tuple[str, int, int]]:
        """Key, pipeline rank and number of the first layer of each stage."""
        before = 0
        for chunk in sorted((key for key in self._state(0, 0, 0) if CHUNK.fullmatch(key)), key=_number):
            for pp in range(self._sizes.pp):
                yield chunk, pp, before
                names = self._state(0, pp, 0).get(chunk, {})
                layers = (LAYER.fullmatch(name.removeprefix("module.")) for name in names)
                before += len({layer[2] for layer in layers if layer and layer[1] == "decoder"})

    def _weights(self, state: Mapping[str, Any]) -> Named:
        """The weights in a rank's file."""
        chunks = sorted((key for key in state if CHUNK.fullmatch(key)), key=_number)
        return {
            (chunk, name.removeprefix("module.")): tensor
            for chunk in chunks
            for name, tensor in state[chunk].items()
            if isinstance(tensor, Tensor) and not name.endswith("_extra_state")
        }

    def _optimizers(self, state: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The states of the optimizers of dense layers and of experts, as torch stores them."""
        return [optimizer.get("optimizer", optimizer) for optimizer in _optimizer_list(state.get("optimizer"))]

    def _adam(self, state: Mapping[str, Any], state_kind: str) -> Named:
        """One kind of a rank's Adam state by parameter; matrices are stored first, then vectors."""
        weights = {key: tensor for key, tensor in self._weights(state).items() if not key[1].endswith(FROZEN)}
        outer = _optimizer_list(state.get("optimizer"))
        states = Named()
        for of_experts, optimizer in enumerate(self._optimizers(state)):
            keys = [key for key in weights if len(outer) == 1 or bool(EXPERT.search(key[1])) == bool(of_experts)]
            keys.sort(key=lambda key: weights[key].dim() < 2 or key[1].endswith(".bias"))
            if state_kind == "main":
                tensors = [tensor for group in outer[of_experts]["fp32_from_fp16_params"] for tensor in group]
            else:
                tensors = [
                    state_of_parameter[state_kind]
                    for _, state_of_parameter in sorted(optimizer["state"].items())
                    if state_kind in state_of_parameter
                ]
            if [tensor.shape for tensor in tensors] != [weights[key].shape for key in keys]:
                raise CheckpointError(
                    f"{self.folder}: the optimizer's {state_kind} does not have the shapes of the weights; use the "
                    "weights alone: convert with --no-optimizer, load with --no-load-optim"
                )
            states |= dict(zip(keys, tensors, strict=True))
        return states

    def _add(
        self,
        tensor_parts: TensorParts,
        name: str,
        tensor: Tensor,
        ranks: tuple[int, int, int],
        before: int,
        model: ModelConfig,
        *,
        is_copy: bool,
    ) -> None:
        """Add a tensor of the file of ``ranks``; ``is_copy``: another file has its dense layers, too."""
        layer = LAYER.fullmatch(name)
        if not name.startswith(MODEL):
            return
        local_name = plain_name(layer[3]) if layer else name
        prefix, expert = (local_name[: match.start()], match) if (match := EXPERT.search(local_name)) else ("", None)
        if is_copy and expert is None:
            return
        tp, etp, ep = ranks
        number: int | None = None
        if expert is not None:
            number = int(expert[1] or expert[4]) + ep * ((model.section(MoEConfig).num_experts or 0) // self._sizes.ep)
            local_name = f"{prefix}mlp.experts.{expert[2] or expert[3]}"
        if layer is not None:
            first = before if layer[1] == "decoder" else 0
            local_name = f"{layer[1]}.layers.{first + int(layer[2])}.{local_name}"
        if has_other_names(model):
            local_name = our_name(local_name)
        latent = model.section(LatentAttentionConfig)
        latents = {"q": latent.q_lora_rank or 0, "kv": latent.kv_lora_rank + latent.qk_pos_emb_head_dim}
        down = (match := DOWN.search(local_name)) is not None and tensor.shape[0] != latents[match[1]]
        rank, size = (tp, self._sizes.tp) if expert is None else (etp, self._sizes.etp)
        split = LocalSplit(rank, size, model.gated_linear_unit, down, rows_of_ranks(model))
        pieces = tensor_parts.setdefault(local_name, [])
        known = {piece.box for piece in pieces}  # the last stage may have a copy of the word embedding
        split_parts = split.parts(local_name, tuple(tensor.shape), lambda: tensor, number)
        pieces.extend(piece for piece in split_parts if piece.box not in known)

    def _path(self, tp: int, pp: int, ep: int) -> Path:
        size = self._sizes
        name = f"mp_rank_{tp:02d}" + f"_{pp:03d}" * (size.pp > 1) + f"_{ep:03d}" * (size.ep > 1)
        return self.folder / name / "model_optim_rng.pt"

    def _state(self, tp: int, pp: int, ep: int) -> dict[str, Any]:
        """The content of a rank's file."""
        name = self._path(tp, pp, ep).parent.name
        if name not in self._files:
            raise CheckpointError(f"{self.folder} has no {name}/model_optim_rng.pt; copy the whole checkpoint")
        return self._load(name)

    def _load(self, name: str) -> dict[str, Any]:
        if name not in self._content:
            content = load_tensors(self._files[name])
            if not isinstance(content, dict):
                raise CheckpointError(
                    f"{self._files[name]} contains a {type(content).__name__}; it must contain a dict"
                )
            content = {str(key): value for key, value in content.items()}
            for key in filter(CHUNK.fullmatch, content):
                if not isinstance(content[key], dict):
                    raise CheckpointError(
                        f"{self._files[name]}: {key} is a {type(content[key]).__name__}; it must be a dict of tensors"
                    )
            self._content[name] = content
        return self._content[name]


def _optimizer_list(stored: Any) -> list[dict[str, Any]]:
    """The optimizers of dense layers and of experts; without experts there is only one."""
    if isinstance(stored, dict) and stored and all(isinstance(key, int) for key in stored):
        stored = [stored[key] for key in sorted(stored)]
    optimizers = stored if isinstance(stored, list) else [stored]
    return [optimizer for optimizer in optimizers if isinstance(optimizer, dict)]


def _number(key: str) -> int:
    return int(key.removeprefix("model") or 0)
