"""Adam's state in the flat buffers of Megatron Core's distributed optimizer.

Each model-parallel rank stores its parameters in reverse order of registration, each at a multiple of 64 elements of a
bucket; with expert parallelism experts have buffers of their own, and each virtual stage has its own. The buffers also
contain the main weights: a state is read only if these agree with the weights, so that another order is an error.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor

from megatron_core.config import ModelConfig
from megatron_core.errors import CheckpointError
from megatron_core.features.experts.settings import MoEConfig
from megatron_core.hub.megatron_lm.tensor_map import (
    FROZEN,
    TIED,
    LocalSplit,
    Shape,
    Sizes,
    TensorParts,
    read_box,
    rows_of_ranks,
    whole_shape,
)
from megatron_core.parallel.boxes import Box

ALIGNMENT = 64
KINDS = {"main": "param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
"""Our kinds of optimizer state -> names in the buffers."""
BUFFER = re.compile(
    r"(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.gbuf_idx_(\d+)\.dtype_(.*)\.bucket_idx_(\d+)\.param"
)
_MLP = [
    *("pre_mlp_layernorm", "mlp", "mlp.router", "mlp.fc1_latent_proj", "mlp.fc2_latent_proj"),
    *("mlp.experts.linear_fc1", "mlp.shared_experts.gate_weight", "mlp.shared_experts.linear_fc1"),
    *("mlp.shared_experts.linear_fc2", "mlp.linear_fc1", "mlp.linear_fc2"),
]
_NORMS = ["q_layernorm", "k_layernorm", "kv_layernorm"]
_LATENTS = ["linear_q_proj", "linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj"]
_MIXER = [f"self_attention.{name}" for name in ("conv1d", "dt_bias", "A_log", "D", "in_proj", "norm", "out_proj")]
_DELTA = ("dt_bias", "A_log", "in_proj", "conv1d", "norm", "out_norm", "out_proj")  # a product or a net has one norm
_DELTA_NET = [f"self_attention.{name}" for name in _DELTA]


def _order(*modules: str) -> list[str]:
    attention = [name if name == "input_layernorm" else f"self_attention.{name}" for name in modules]
    attention.insert(attention.index("input_layernorm") + 1, "self_attention")
    return [*attention, *_MLP]


_INDEXER = [f"core_attention.indexer.{name}" for name in ("linear_wq_b", "linear_wk", "k_norm", "linear_weights_proj")]
ORDERS = (
    _order("input_layernorm", *_INDEXER, "linear_proj", "linear_qkv", *_LATENTS, *_NORMS),
    _order("linear_proj", "input_layernorm", "linear_qkv", "q_layernorm", "k_layernorm"),
    _order("input_layernorm", "linear_proj", *_LATENTS[:2], "q_layernorm", *_LATENTS[2:4], "kv_layernorm", _LATENTS[4]),
)
"""Registration order of a layer's modules: local layers, layers of Transformer Engine, the same with MLA."""
_FUSED = {
    "mamba2": [*_MIXER[:4], "input_layernorm", *_MIXER[4:]],
    "gated_delta_net": [*_DELTA_NET[:2], "input_layernorm", *_DELTA_NET[2:], *_MLP],
}
_FUSED["gated_delta_product"] = _FUSED["gated_delta_net"]
_LOCAL = {"mamba2": [*_MIXER, "input_layernorm"], "gated_delta_net": ["input_layernorm", *_DELTA_NET, *_MLP]}
_LOCAL["gated_delta_product"] = [*_DELTA_NET, "input_layernorm"]
MIXERS = (_LOCAL, _FUSED, _FUSED)
"""The same of a layer with a recurrence, by its kind, in Megatron Core 0.19."""


@dataclass(frozen=True)
class FlatBuffer:
    """A buffer of a rank: the sizes of its buckets, and a function that reads (kind, bucket, start, stop).

    ``sizes`` is None if the buckets are stored one after another as a single bucket of ``total`` elements.
    """

    sizes: tuple[int, ...] | None
    read: Callable[[str, int, int, int], Tensor]
    total: int = 0


MixerOrders = Mapping[str, Sequence[str]]
Buffers = Mapping[bool, Mapping[int, Sequence[FlatBuffer]]]
"""Whether of experts -> model-parallel rank -> the buffers of its virtual stages."""


@dataclass(frozen=True)
class ParameterKey:
    """A parameter of a rank: our name, and the number of the expert among the rank's, if it is a matrix of one."""

    name: str
    expert: int | None = None


@dataclass(frozen=True)
class BufferSlot:
    """The place of a rank's parameter in a buffer; ``expert`` is the number among all experts."""

    name: str
    expert: int | None
    split: LocalSplit
    shape: Shape
    buffer: FlatBuffer
    bucket: int
    start: int

    def read(self, state_kind: str) -> Tensor:
        """Read one kind of state."""
        stop = self.start + prod(self.shape)
        return self.buffer.read(KINDS[state_kind], self.bucket, self.start, stop).view(self.shape)


def slices(
    keys: Sequence[ParameterKey], shapes: Mapping[ParameterKey, Shape], sizes: Sequence[int]
) -> dict[ParameterKey, tuple[int, int]] | None:
    """Bucket and offset of each parameter in buckets of ``sizes`` elements; None if the sizes do not fit."""
    offsets = {}
    bucket = 0
    end = 0
    for key in reversed(keys):
        start = _aligned(end)
        size = prod(shapes[key])
        if bucket < len(sizes) and start + size > sizes[bucket]:
            if not end <= sizes[bucket] <= start:
                return None
            bucket = bucket + 1
            start = 0
        end = start + size
        if bucket >= len(sizes) or end > sizes[bucket]:
            return None
        offsets[key] = (bucket, start)
    return offsets if bucket == len(sizes) - 1 and end == sizes[bucket] else None


def bucket_sizes(
    keys: Sequence[ParameterKey], shapes: Mapping[ParameterKey, Shape], limit: int | None, *, alone: bool
) -> list[int]:
    """Sizes of the buckets into which Megatron Core puts the parameters.

    ``limit``: a bucket ends at this number of elements; ``alone``: weights of embedding and output layer are alone.
    """
    sizes = list[int]()
    end = 0
    for key in reversed(keys):
        start = _aligned(end)
        is_alone = alone and key.name in TIED
        if is_alone and end:
            sizes.append(start)
            start = 0
        end = start + prod(shapes[key])
        if is_alone or (limit is not None and end >= limit):
            sizes.append(end)
            end = 0
    return [*sizes, end] if end else sizes


def _aligned(end: int) -> int:
    return -(-end // ALIGNMENT) * ALIGNMENT


class FlatState:
    """Locates the state of each parameter in ``buffers``.

    ``weights`` are the stored weights, ``limits`` the possible sizes of buckets, for buffers without their sizes.
    """

    def __init__(
        self, model: ModelConfig, sizes: Sizes, weights: TensorParts, buffers: Buffers, limits: Sequence[int | None]
    ) -> None:
        self.model = model
        self.layout = sizes
        self.weights = weights
        self.buffers = buffers
        self.limits = limits
        self.pieces = rows_of_ranks(model)
        self.shapes = {
            name: whole_shape(tensor_parts) for name, tensor_parts in weights.items() if not name.endswith(FROZEN)
        }
        self.ties = model.share_embeddings_and_output_weights
        if self.ties:
            self.shapes[TIED[1]] = self.shapes[TIED[0]]
        self.stages = sizes.pp * max((len(stage_buffers) for stage_buffers in buffers[False].values()), default=0)

    def parts(self) -> dict[str, TensorParts]:
        """The parts of each kind of state; empty if no known order of the parameters fits."""
        layout = self.layout
        # Without expert parallelism the experts' matrices are in the buffers of the dense layers.
        inside: tuple[bool | None, ...] = (
            (None,) if self.buffers[True] or not self.model.section(MoEConfig).num_experts else (False, True)
        )
        splits = not any(groups % layout.tp for groups in self.model.all_query_groups)
        complete = len(self.buffers[False]) == layout.tp * layout.pp and splits
        for order, mixers in zip(ORDERS, MIXERS, strict=True) if complete else ():
            for down, grouped_inside in product((False, True), inside):
                dense, stages = self._dense(order, mixers, down=down, grouped=grouped_inside)
                if dense and all(map(self._agrees, (*dense[:8], *dense[-8:]))):
                    if not self.buffers[True]:
                        return self._collected(dense)
                    for grouped in (False, True):
                        experts = self._of_experts(stages, grouped=grouped)
                        if experts and all(map(self._agrees, experts[:8])):
                            return self._collected(dense + experts)
        return {}

    def _dense(
        self, order: list[str], mixers: MixerOrders, *, down: bool, grouped: bool | None
    ) -> tuple[list[BufferSlot], list[range]]:
        """Places of all parameters, and the layers of each stage; nothing if the sizes do not fit.

        ``grouped``: order of the experts' matrices; None: they are in other buffers.
        """
        slots = list[BufferSlot]()
        stages = list[range]()
        first = 0
        tp = self.layout.tp
        for stage in range(self.stages):
            chunk, rank = divmod(stage, self.layout.pp)
            buffers = [self.buffers[False][rank * tp + t][chunk] for t in range(tp)]
            for stop in range(first, self.model.num_layers + 1):
                names = self._registered(order, mixers, range(first, stop), stage)
                keys = [key for name in names for key in self._keys(name, grouped)]
                of_ranks = [
                    self._placed(keys, self._split(t, tp, down=down), buffer) for t, buffer in enumerate(buffers)
                ]
                if all(of_ranks):
                    break
            else:
                return [], []
            stages.append(range(first, stop))
            first = stop
            slots += [slot for places in of_ranks for slot in places]
        return (slots, stages) if first == self.model.num_layers else ([], [])

    def _split(self, rank: int, size: int, *, down: bool = False) -> LocalSplit:
        return LocalSplit(rank, size, self.model.gated_linear_unit, down, self.pieces)

    def _placed(
        self, keys: list[ParameterKey], split: LocalSplit, buffer: FlatBuffer, first: int = 0
    ) -> list[BufferSlot]:
        """The places of ``keys`` in a buffer, or nothing; ``first``: number of the rank's first expert."""
        shapes = {}
        for key in keys:
            shape = self.shapes[key.name] if key.expert is None else self.shapes[key.name][1:]
            shapes[key] = split.local_shape(key.name, shape)
        offsets = None if buffer.sizes is None else slices(keys, shapes, buffer.sizes)
        for limit in self.limits if buffer.sizes is None else ():
            sizes = bucket_sizes(keys, shapes, limit, alone=self.ties and self.layout.pp > 1)
            if sum(sizes) == buffer.total and offsets is None:
                inside = slices(keys, shapes, sizes) or {}
                offsets = {key: (0, sum(sizes[:bucket]) + start) for key, (bucket, start) in inside.items()}
        return [
            BufferSlot(
                key.name,
                None if key.expert is None else first + key.expert,
                split,
                shapes[key],
                buffer,
                *bucket_and_start,
            )
            for key, bucket_and_start in (offsets or {}).items()
        ]

    def _registered(self, order: list[str], mixers: MixerOrders, layers: range, stage: int) -> list[str]:
        """Names of a stage's parameters in order of registration; ``mixers``: the order in layers with mixers."""
        kinds = ("", "_bias", ".weight", ".bias")
        depths = self.model.distinct_added_layers
        inner = [f"{module}{suffix}" for module in order for suffix in kinds]
        of_mixers = {
            name: [f"{module}{suffix}" for module in modules for suffix in kinds] for name, modules in mixers.items()
        }
        is_first = stage == 0
        is_last = stage == self.stages - 1
        names = [TIED[0], "embedding.position_embeddings.weight"] * (is_first or (is_last and depths > 0))
        for layer in layers:
            names_of_layer = of_mixers.get(self.model.recurrence_of(layer) or "", inner)
            names += [f"decoder.layers.{layer}.{name}" for name in names_of_layer]
        if is_last:
            around = [f"{module}{suffix}" for module in ("enorm", "hnorm", "eh_proj") for suffix in kinds]
            around += [*(f"mtp_model_layer.{name}" for name in inner), "final_layernorm.weight", "final_layernorm.bias"]
            names += ["decoder.final_layernorm.weight", "decoder.final_layernorm.bias"]
            names += [f"mtp.layers.{depth}.{name}" for depth in range(depths) for name in around]
            names += [TIED[1]] * (not (self.ties and is_first))
        return [name for name in names if name in self.shapes]

    def _of_experts(self, stages: list[range], *, grouped: bool) -> list[BufferSlot]:
        """Places of the experts' matrices; nothing if the sizes do not fit."""
        layout = self.layout
        slots = list[BufferSlot]()
        per_rank = (self.model.section(MoEConfig).num_experts or 0) // layout.ep
        for rank, buffers in self.buffers[True].items():
            etp = rank % layout.etp
            ep = rank // layout.etp % layout.ep
            pp = rank // (layout.etp * layout.ep)
            of_stages = [
                list(self._expert_keys(stages[stage], per_rank, stage, grouped=grouped))
                for stage in range(pp, len(stages), layout.pp)
            ]
            of_stages = [keys for keys in of_stages if keys]
            if len(of_stages) != len(buffers):
                return []
            for keys, buffer in zip(of_stages, buffers, strict=True):
                places = self._placed(keys, self._split(etp, layout.etp), buffer, ep * per_rank)
                if not places:
                    return []
                slots += places
        return slots

    def _expert_keys(self, layers: range, per_rank: int, stage: int, *, grouped: bool) -> Iterator[ParameterKey]:
        """The experts' matrices of a stage in order of registration: by matrix if ``grouped``, else by expert."""
        depths = self.model.distinct_added_layers if stage == self.stages - 1 else 0
        roots = [f"decoder.layers.{layer}." for layer in layers]
        roots += [f"mtp.layers.{depth}.mtp_model_layer." for depth in range(depths)]
        for root in roots:
            yield from self._keys_of_experts(root, per_rank, grouped=grouped)

    def _keys_of_experts(self, root: str, count: int, *, grouped: bool) -> Iterator[ParameterKey]:
        """The matrices of ``count`` experts of a layer."""
        names = [name for n in (1, 2) if (name := f"{root}mlp.experts.linear_fc{n}.weight") in self.shapes]
        if grouped:
            yield from (ParameterKey(name, number) for name in names for number in range(count))
        else:
            yield from (ParameterKey(name, number) for number in range(count) for name in names)

    def _keys(self, name: str, grouped: bool | None) -> Iterator[ParameterKey]:
        """The parameter ``name``; for the first matrices of experts all their matrices, if they are in this buffer."""
        root, experts, _ = name.partition("mlp.experts.")
        if not experts:
            yield ParameterKey(name)
        elif grouped is not None and name.endswith(".weight"):
            yield from self._keys_of_experts(root, self.model.section(MoEConfig).num_experts or 0, grouped=grouped)

    def _agrees(self, slot: BufferSlot) -> bool:
        """Whether the main weights at ``slot`` are the stored weights."""
        main = slot.read("main")
        shape = self.shapes[slot.name]
        source = self.weights[slot.name if slot.name in self.weights else TIED[0]]
        lead = () if slot.expert is None else (slot.expert,)
        for global_box, box in slot.split.boxes(slot.name, shape[len(lead) :]):
            stacked = Box((*lead, *global_box.start), (*(number + 1 for number in lead), *global_box.stop))
            stored = read_box(source, stacked).reshape(box.shape)
            if not torch.equal(main[box.index].to(stored.dtype), stored):
                return False
        return True

    def _collected(self, places: list[BufferSlot]) -> dict[str, TensorParts]:
        """The parts of all parameters by kind and name."""
        collected: dict[str, TensorParts] = {
            state_kind: {name: [] for name in self.weights if name in self.shapes} for state_kind in KINDS
        }
        for state_kind, tensor_parts in collected.items():
            seen = set()
            for slot in places:
                for piece in slot.split.parts(
                    slot.name, slot.shape, partial(self._read, state_kind, slot), slot.expert
                ):
                    if slot.name in tensor_parts and (slot.name, piece.box) not in seen:  # not copies of other stages
                        seen.add((slot.name, piece.box))
                        tensor_parts[slot.name].append(piece)
        return collected

    def _read(self, state_kind: str, slot: BufferSlot) -> Tensor:
        if state_kind != "exp_avg_sq" and not self._agrees(slot):
            raise CheckpointError(
                f"the main weights of {slot.name} in the flat buffers are not the stored weights: the order of "
                "the parameters is unknown. Save with --dist-ckpt-optim-fully-reshardable, or load the weights "
                "alone with --no-load-optim"
            )
        return slot.read(state_kind)


def coalesced(state: Mapping[Any, Any]) -> list[FlatBuffer]:
    """The buffers of a rank, each with all its buckets in one tensor for each kind of state.

    ``state`` is the content of ``distrib_optim.pt``, or of ``param_state`` in the format ``dp_zero_gather_scatter``.
    """
    buffers = []
    for number in sorted(key for key in state if isinstance(key, int)):
        for kinds in state[number].values():
            total = int(kinds.get("numel_unpadded", kinds["param"].numel()))

            def read(
                state_kind: str, bucket: int, start: int, stop: int, kinds: Mapping[str, Tensor] = kinds
            ) -> Tensor:
                return kinds[state_kind][start:stop]

            buffers.append(FlatBuffer(None, read, total))
    return buffers


def bucket_limits(arguments: Mapping[str, Any]) -> list[int | None]:
    """The possible sizes of the buckets of a training with these arguments."""
    ranks = int(arguments.get("data_parallel_size") or 1)
    bucket_size = arguments.get("ddp_bucket_size")
    return [None, int(bucket_size) if bucket_size else max(40_000_000, 1_000_000 * ranks)]
