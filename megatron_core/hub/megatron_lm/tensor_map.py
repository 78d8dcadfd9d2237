"""Names and splits of Megatron-LM's tensors, and the pieces of the projections of mixers, translated to ours."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_core.config import ModelConfig
from megatron_core.errors import CheckpointError, quoted
from megatron_core.features.recurrent.kinds import GatedDeltaNetKind, GatedDeltaProductKind, Mamba2, RecurrenceKind
from megatron_core.features.recurrent.settings import RecurrentConfig
from megatron_core.hub.rules import unlike_delta_net
from megatron_core.parallel.boxes import Box

FUSED = {
    "self_attention.linear_qkv.layer_norm": "input_layernorm.",
    "mlp.linear_fc1.layer_norm": "pre_mlp_layernorm.",
    "self_attention.layer_norm": "input_layernorm.",
    "mlp.layer_norm": "pre_mlp_layernorm.",
    "self_attention.linear_q_up_proj.layer_norm": "self_attention.q_layernorm.",
    "self_attention.linear_kv_up_proj.layer_norm": "self_attention.kv_layernorm.",
}
"""Norms that Transformer Engine fuses into the following layer -> their names here; ``self_attention`` and ``mlp`` are
themselves linear layers in some layers of different sizes."""
ROWS = re.compile(
    r"(word_embeddings|output_layer|linear_qkv|linear_q_proj|linear_q_up_proj|linear_kv_up_proj|linear_fc1|eh_proj)"
    r"\.(weight|bias)$|(self_attention|mlp)\.(weight|bias)$|self_attention\.softmax_offset$"
    r"|self_attention\.(in_proj\.weight|conv1d\.weight|conv1d\.bias|dt_bias|A_log|D|norm)$"
)
COLUMNS = re.compile(r"(linear_proj|linear_fc2|out_proj)\.weight$")
PIECED = re.compile(r"self_attention\.(in_proj|conv1d)\.(?:weight|bias)$")
DOWN = re.compile(r"linear_(q|kv)_down_proj\.weight$")
"""Weights that are split by rows without Transformer Engine, and replicated with it."""
LAYER = re.compile(r"(decoder|mtp)\.layers\.(\d+)\.(.*)")
EXPERT = re.compile(
    r"mlp\.experts\.(?:local_experts\.(\d+)\.(linear_fc[12]\.(?:weight|bias))|(linear_fc[12]\.(?:weight|bias))(\d+))$"
)
INNER = {"mtp_model_layer.": "transformer_layer."}
"""Name of the layer inside a layer of multi-token prediction -> its name in stored keys."""
STACKED = re.compile(r"layers\.\d+\.")
"""In hybrid models this layer is two, attention and an MLP, with numbers."""
MODEL = ("embedding.", "decoder.", "mtp.", "output_layer.")
FROZEN = "router.expert_bias", "router.qb_beta"
"""The tensors of a model without gradient."""
TIED = ("embedding.word_embeddings.weight", "output_layer.weight")
Shape = tuple[int, ...]


@dataclass(frozen=True)
class TensorPart:
    """A box of one of our tensors, and a function that reads its values."""

    box: Box
    read: Callable[[], Tensor]


TensorParts = dict[str, list[TensorPart]]


def plain_name(local_name: str) -> str:
    """Translate a name inside a layer to ours."""
    for ours, theirs in INNER.items():
        if local_name.startswith((ours, theirs)):
            return ours + plain_name(STACKED.sub("", local_name.removeprefix(theirs).removeprefix(ours), count=1))
    for theirs, ours in FUSED.items():
        if local_name.startswith(theirs + "_"):
            return ours + local_name.rpartition("_")[2]
    return local_name.replace("mlp.experts.experts.", "mlp.experts.").replace(
        "core_attention.softmax_offset", "softmax_offset"
    )


def whole_shape(pieces: Iterable[TensorPart]) -> Shape:
    """The smallest shape that contains all ``pieces``."""
    return tuple(max(ends) for ends in zip(*(piece.box.stop for piece in pieces), strict=True))


def read_box(pieces: Iterable[TensorPart], box: Box) -> Tensor:
    """Read ``box`` of a tensor in the dtype of its parts."""
    values_of_box: Tensor | None = None
    for piece in pieces:
        common = box.intersect(piece.box)
        if common is not None:
            values = piece.read()
            values_of_box = values.new_zeros(box.shape) if values_of_box is None else values_of_box
            values_of_box[common.within(box)] = values[common.within(piece.box)]
    return torch.zeros(box.shape) if values_of_box is None else values_of_box


@dataclass(frozen=True)
class LocalSplit:
    """The part of each tensor that a rank of a tensor-parallel group has.

    ``gated``: linear_fc1 consists of two halves, each split. ``down``: ``DOWN`` weights are split.
    ``pieces``: number of a layer -> the pieces of its mixer's projection, each of which is split.
    """

    rank: int
    size: int
    gated: bool
    down: bool = False
    pieces: "Mapping[int, MixerPieces]" = field(default_factory=dict)

    def boxes(self, name: str, shape: Shape) -> Iterator[tuple[Box, Box]]:
        """Yield boxes of the whole tensor with ``shape``, and their places in the local tensor.

        Nothing for a replicated tensor, except on the first rank; then the whole tensor.
        """
        zero = (0,) * len(shape)
        if (pieced := PIECED.search(name)) and (pieces := self._pieces(name)):
            row = 0
            for index in pieces.order[pieced[1]]:
                rows = pieces.rows[index] // self.size
                local = Box((row, *zero[1:]), (row + rows, *shape[1:]))
                first = sum(pieces.rows[:index]) + self.rank * rows
                yield local.shifted((first - row, *zero[1:])), local
                row += rows
        elif ROWS.search(name) or (self.down and DOWN.search(name)):
            halves = 2 if self.gated and "linear_fc1." in name else 1
            rows = shape[0] // halves // self.size
            for half in range(halves):
                local = Box((half * rows, *zero[1:]), ((half + 1) * rows, *shape[1:]))
                first = (half * self.size + self.rank) * rows
                yield local.shifted((first - half * rows, *zero[1:])), local
        elif COLUMNS.search(name):
            local = Box(zero, (shape[0], shape[1] // self.size))
            yield local.shifted((0, self.rank * local.stop[1])), local
        elif self.rank == 0:
            yield Box(zero, shape), Box(zero, shape)

    def _pieces(self, name: str) -> "MixerPieces | None":
        """The pieces of the layer of the tensor ``name``; None if it is not in a layer with a mixer."""
        layer = LAYER.fullmatch(name)
        return self.pieces.get(int(layer[2])) if layer is not None and layer[1] == "decoder" else None

    def local_shape(self, name: str, shape: Shape) -> Shape:
        """The shape of a rank's tensor, from the shape of the whole one."""
        boxes = list(replace(self, rank=0).boxes(name, shape))
        return tuple(max(ends) for ends in zip(*(local.stop for _, local in boxes), strict=True))

    def whole_shape(self, name: str, local: Shape) -> Shape:
        """The shape of the whole tensor, from the shape of a rank's."""
        if ROWS.search(name) or (self.down and DOWN.search(name)):
            return (local[0] * self.size, *local[1:])
        return (local[0], local[1] * self.size) if COLUMNS.search(name) else local

    def parts(self, name: str, local: Shape, read: Callable[[], Tensor], expert: int | None = None) -> list[TensorPart]:
        """A rank's tensor as parts of ours; ``expert``: the number of the expert to which the matrix belongs."""
        pieces = []
        for global_box, box in self.boxes(name, self.whole_shape(name, local)):
            if expert is None:
                pieces.append(TensorPart(global_box, lambda box=box: read()[box.index]))  # type: ignore[misc]
            else:
                stacked = Box((expert, *global_box.start), (expert + 1, *global_box.stop))
                pieces.append(TensorPart(stacked, lambda box=box: read()[box.index][None]))  # type: ignore[misc]
        return pieces


@dataclass(frozen=True)
class Sizes:
    """The model-parallel sizes of a stored training."""

    tp: int
    pp: int
    ep: int
    etp: int

    @classmethod
    def of(cls, arguments: Mapping[str, object]) -> "Sizes":
        """Read them from the arguments of the training."""
        names = [
            f"{name}_parallel_size" for name in ("tensor_model", "pipeline_model", "expert_model", "expert_tensor")
        ]
        sizes = []
        for name in names:
            value = arguments.get(name) or 0
            if not isinstance(value, int) or value < 0:
                raise CheckpointError(f"{name} of the checkpoint is {quoted(value)}; it must be an integer >= 1")
            sizes.append(value)
        tp, pp, ep, etp = sizes
        return cls(max(tp, 1), max(pp, 1), max(ep, 1), etp or max(tp, 1))


MIXER = re.compile(r"(decoder\.layers\.\d+\.)(mixer|self_attention)\.(.+)")
"""Names of a layer with a Mamba-2 mixer, and of a layer with a gated delta net or attention."""
PIECE = re.compile(r"(in_proj\.weight|conv1d\.weight|conv1d\.bias)\.(\w+)")
RENAMED = {"in_proj.layer_norm_weight": "input_layernorm.weight", "in_proj.layer_norm_bias": "input_layernorm.bias"}
"""The norm before a mixer, which Transformer Engine fuses into the projection."""
CONVOLUTION = re.compile(r"^conv1d_")
"""Start of the names of the convolution's parameters in Megatron Core 0.19.2; elsewhere the convolution is a module."""
PLAIN_NORM = re.compile(r"(decoder\.layers\.\d+\.)norm\.(weight|bias)")
"""The norm before a mixer without Transformer Engine."""
OURS = re.compile(r"(.*?)decoder\.(?:layers\.(\d+)\.(.+)|final_layernorm\.(?:weight|bias))")
"""Names of our tensors of a layer, or of the final norm, after the prefix of a kind."""
STORED_IN_PIECES = ("in_proj.weight", "conv1d.weight", "conv1d.bias")
FINAL = {f"decoder.final_norm.{suffix}": f"decoder.final_layernorm.{suffix}" for suffix in ("weight", "bias")}
OWN_NORM = re.compile(r".*\.self_attention\.out_norm")
"""The norm of outputs of a delta net, whose weight here is the factor, also with ``apply_layernorm_1p``."""


def _names_in_product(updates: int) -> tuple[str, ...]:
    values, keys, rates = ([f"{letter}{number}" for number in range(updates)] for letter in "VKb")
    return (*values, *keys, "Q", "z", *rates, "a")


class MixerPieces(NamedTuple):
    """The pieces of a mixer's projection and convolution."""

    names: tuple[str, ...]
    """Megatron Core's names, in our order."""
    rows: tuple[int, ...]
    """Their rows over all ranks, in our order."""
    order: dict[str, tuple[int, ...]]
    """"in_proj" or "conv1d" -> the places here of its pieces in the order of Megatron Core's ranks."""


class StoredMixer(NamedTuple):
    """How Megatron Core stores a kind of mixer."""

    module: str
    """Its name of the mixer."""
    names: Callable[[int], tuple[str, ...]]
    """Its names of the pieces in our order (``RecurrenceKind.pieces``), for a number of updates."""
    norm: str
    """Our name of the norm of outputs; there it is a module with a weight."""
    recurrence: type[RecurrenceKind]

    def pieces(self, model: ModelConfig) -> MixerPieces:
        """The pieces of this mixer in ``model``."""
        sizes = self.recurrence(model)
        names = self.names(sizes.updates)
        places = range(len(names))
        # In the matrices of a rank the gates z are the first piece, except for a delta net, with our order.
        first = [names.index("z")] if self.module == "mixer" else []
        order = {"in_proj": (*first, *(place for place in places if place not in first))}
        return MixerPieces(names, sizes.pieces, order | {"conv1d": tuple(places[: len(sizes.convolved_pieces)])})


STORED = {
    Mamba2.name: StoredMixer("mixer", lambda _: ("x", "B", "C", "z", "dt"), "norm", Mamba2),
    GatedDeltaProductKind.name: StoredMixer("mixer", _names_in_product, "norm", GatedDeltaProductKind),
    GatedDeltaNetKind.name: StoredMixer(
        "self_attention", lambda _: ("query", "key", "value", "z", "beta", "alpha"), "out_norm", GatedDeltaNetKind
    ),
}
"""The mixers by kind."""
NORMS = {
    f"{mixer.module}.{mixer.norm}.{suffix}": ours
    for mixer in STORED.values()
    for suffix, ours in (("weight", mixer.norm), ("bias", f"{mixer.norm}_bias"))
}
"""Names of the norms of outputs there, with the module of the mixer -> ours."""


def has_other_names(model: ModelConfig) -> bool:
    """Whether names of the model's tensors are not those of a model with attention in each layer."""
    return model.section(RecurrentConfig).hybrid_layer_pattern is not None or bool(rows_of_ranks(model))


def our_name(name: str) -> str:
    """Translate the name of a tensor of a model with mixers, without the name of its piece, to ours."""
    if (plain := PLAIN_NORM.fullmatch(name)) is not None:
        return f"{plain[1]}input_layernorm.{plain[2]}"
    if (mixer := MIXER.fullmatch(name)) is None:
        return FINAL.get(name, name)
    local_name = CONVOLUTION.sub("conv1d.", mixer[3])
    return mixer[1] + RENAMED.get(local_name, "self_attention." + NORMS.get(f"{mixer[2]}.{local_name}", local_name))


def with_mixers(tensor_parts: TensorParts, model: ModelConfig) -> TensorParts:
    """Return the parts of a model with mixers under our names, with the rows of each piece in their place."""
    if not has_other_names(model):
        return tensor_parts
    named = TensorParts()
    names_of_kinds = GatedDeltaNetKind.name, model.section(RecurrentConfig).mamba_mixer
    kinds = {STORED[name].module: STORED[name] for name in names_of_kinds}
    for name, blocks in tensor_parts.items():
        full_name = name
        if (mixer := MIXER.fullmatch(name)) is not None and (piece := PIECE.fullmatch(mixer[3])) is not None:
            full_name = f"{mixer[1]}{mixer[2]}.{piece[1]}"
            mixer_of_name = kinds[mixer[2]]
            pieces = mixer_of_name.pieces(model)
            if piece[2] not in pieces.names:
                raise CheckpointError(f"{name} is not a piece of a projection of {mixer_of_name.recurrence.name}")
            first = sum(pieces.rows[: pieces.names.index(piece[2])])
            blocks = [
                replace(block, box=block.box.shifted((first, *(0 for _ in block.box.shape[1:])))) for block in blocks
            ]
        named.setdefault(our_name(full_name), []).extend(blocks)
    return named


def in_our_order(tensor_parts: TensorParts, model: ModelConfig, ranks: int) -> TensorParts:
    """Return ``tensor_parts`` with the rows of mixers' whole projections in our order.

    They are stored as the rows of ``ranks`` tensor-parallel ranks, one rank after another."""
    rows = rows_of_ranks(model)
    named = TensorParts()
    for name, blocks in tensor_parts.items():
        ours = our_name(name)
        layer = LAYER.fullmatch(ours)
        is_whole = (
            layer is not None and layer[3].removeprefix("self_attention.") in STORED_IN_PIECES and int(layer[2]) in rows
        )
        if is_whole:
            blocks = [moved for block in blocks for moved in _moved(block, ours, whole_shape(blocks), ranks, rows)]
        named[name] = blocks
    return named


def _moved(
    block: TensorPart, name: str, shape: tuple[int, ...], ranks: int, rows: dict[int, MixerPieces]
) -> Iterator[TensorPart]:
    """Yield the pieces of a part of the tensor ``name``."""
    for rank in range(ranks):
        for global_box, local in LocalSplit(rank, ranks, gated=False, pieces=rows).boxes(name, shape):
            stored = local.shifted((rank * (shape[0] // ranks), *(0 for _ in shape[1:])))
            common = block.box.intersect(stored)
            if common is not None:
                index = common.within(block.box)
                shift = tuple(a - b for a, b in zip(global_box.start, stored.start, strict=True))
                yield TensorPart(common.shifted(shift), lambda index=index: block.read()[index])  # type: ignore[misc]


def pieces_of_mixer(
    name: str, shape: tuple[int, ...], box: Box, model: ModelConfig
) -> Iterator[tuple[str, tuple[int, ...], Box, Box]]:
    """Yield the parts of ``box`` of our tensor ``name`` in Megatron Core: its name and shape there, the part's place in
    it, and the part in our tensor. One part for a tensor that is not stored in pieces."""
    match = OURS.fullmatch(name) if has_other_names(model) else None
    if match is None:
        yield name, shape, box, box
        return
    prefix = match[1]
    number = match[2]
    local_name = match[3]
    if number is None:
        final = "final_layernorm" if model.section(RecurrentConfig).hybrid_layer_pattern is None else "final_norm"
        yield f"{prefix}decoder.{final}.{name.rpartition('.')[2]}", shape, box, box
        return
    mixer = stored_mixer(model, int(number))
    if mixer is None or not local_name.startswith(("self_attention.", "input_layernorm.")):
        yield name, shape, box, box
        return
    prefix = f"{prefix}decoder.layers.{number}.{mixer.module}."
    local_name = local_name.removeprefix("self_attention.")
    if local_name not in STORED_IN_PIECES:
        theirs = {ours: name for name, ours in RENAMED.items()}
        theirs |= {mixer.norm: f"{mixer.norm}.weight", f"{mixer.norm}_bias": f"{mixer.norm}.bias"}
        yield prefix + theirs.get(local_name, local_name), shape, box, box
        return
    pieces = mixer.pieces(model)
    zero = (0,) * (len(shape) - 1)
    for index, (piece, size) in enumerate(zip(pieces.names, pieces.rows, strict=True)):
        first = sum(pieces.rows[:index])
        common = box.intersect(Box((first, *zero), (first + size, *shape[1:])))
        if common is not None:
            yield f"{prefix}{local_name}.{piece}", (size, *shape[1:]), common.shifted((-first, *zero)), common


def stored_mixer(model: ModelConfig, layer: int) -> StoredMixer | None:
    """The mixer of a layer; None: it has none."""
    return STORED.get(model.recurrence_of(layer) or "")


def rows_of_ranks(model: ModelConfig) -> dict[int, MixerPieces]:
    """The pieces of each layer's mixer, for ``LocalSplit``."""
    mixers = {layer: stored_mixer(model, layer) for layer in range(model.num_layers)}
    return {layer: mixer.pieces(model) for layer, mixer in mixers.items() if mixer is not None}


def check_delta_nets(model: ModelConfig, folder: object) -> None:
    """``CheckpointError`` if the model has gated delta nets that compute something else here."""
    if settings := unlike_delta_net(model):
        raise CheckpointError(
            f"{folder} was trained with {', '.join(settings)}: gates and norms of gated delta nets would be others here"
        )


def norm_offset(name: str, model: ModelConfig) -> float:
    """Our weight ``name`` minus that of Megatron Core, which applies ``apply_layernorm_1p`` to all norms."""
    return float(model.apply_layernorm_1p and OWN_NORM.fullmatch(name) is not None)


def with_offsets(tensor_parts: TensorParts, model: ModelConfig) -> TensorParts:
    """Return the parts of weights, or of main weights, with those of delta nets' norms as they are here."""
    changed = {
        name: [TensorPart(piece.box, lambda read=piece.read: read().float() + 1) for piece in pieces]  # type: ignore[misc]
        for name, pieces in tensor_parts.items()
        if norm_offset(name, model)
    }
    return tensor_parts | changed
