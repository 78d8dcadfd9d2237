"""Names and splits of Megatron-LM's tensors, translated to ours."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from megatron_core.errors import CheckpointError, quoted
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
PIECES = {"in_proj": (3, 0, 1, 2, 4), "conv1d": (0, 1, 2)}
"""Places here (``Mamba2.pieces``) of the pieces of a Mamba-2 mixer's tensors, in the order of Megatron Core's ranks."""
DELTA_PIECES = {"in_proj": tuple(range(6)), "conv1d": (0, 1, 2)}
"""The same of a gated delta net, whose projection has more pieces."""
PIECED = re.compile(r"self_attention\.(in_proj|conv1d)\.(?:weight|bias)$")
DOWN = re.compile(r"linear_(q|kv)_down_proj\.weight$")
"""Weights that are split by rows without Transformer Engine, and replicated with it."""
LAYER = re.compile(r"(decoder|mtp)\.layers\.(\d+)\.(.*)")
EXPERT = re.compile(
    r"mlp\.experts\.(?:local_experts\.(\d+)\.(linear_fc[12]\.(?:weight|bias))|(linear_fc[12]\.(?:weight|bias))(\d+))$"
)
WHOLE_EXPERTS = re.compile(r"mlp\.experts\.linear_fc[12]\.(weight|bias)$")
"""Our name of the matrices and biases of all experts of a layer, whose first dimension are the experts."""
INNER = {"mtp_model_layer.": "transformer_layer."}
"""Name of the layer inside a layer of multi-token prediction -> its name in stored keys."""
STACKED = re.compile(r"layers\.\d+\.")
"""In hybrid models this layer is two, attention and an MLP, with numbers."""
MODEL = ("embedding.", "decoder.", "mtp.", "output_layer.")
FROZEN = "router.expert_bias"
"""The only tensor of a model without gradient."""
TIED = ("embedding.word_embeddings.weight", "output_layer.weight")
Shape = tuple[int, ...]


@dataclass(frozen=True)
class TensorPart:
    """A box of one of our tensors, and a function that reads its values."""

    box: Box
    read: Callable[[], Tensor]


TensorParts = dict[str, list[TensorPart]]


def plain_name(rest: str) -> str:
    """Translate a name inside a layer to ours."""
    for ours, theirs in INNER.items():
        if rest.startswith((ours, theirs)):
            return ours + plain_name(STACKED.sub("", rest.removeprefix(theirs).removeprefix(ours), count=1))
    for theirs, ours in FUSED.items():
        if rest.startswith(theirs + "_"):
            return ours + rest.rpartition("_")[2]
    return rest.replace("mlp.experts.experts.", "mlp.experts.").replace(
        "core_attention.softmax_offset", "softmax_offset"
    )


def whole_shape(parts: Iterable[TensorPart]) -> Shape:
    """The smallest shape that contains all ``parts``."""
    return tuple(max(ends) for ends in zip(*(part.box.stop for part in parts), strict=True))


def read_box(parts: Iterable[TensorPart], box: Box) -> Tensor:
    """Read ``box`` of a tensor in the dtype of its parts."""
    found: Tensor | None = None
    for part in parts:
        common = box.intersect(part.box)
        if common is not None:
            values = part.read()
            found = values.new_zeros(box.shape) if found is None else found
            found[common.within(box)] = values[common.within(part.box)]
    return torch.zeros(box.shape) if found is None else found


@dataclass(frozen=True)
class LocalSplit:
    """The part of each tensor that a rank of a tensor-parallel group has.

    ``gated``: linear_fc1 consists of two halves, each split. ``down``: ``DOWN`` weights are split.
    ``pieces``: number of a layer -> rows of the pieces of its mixer's projection, each of which is split.
    """

    rank: int
    size: int
    gated: bool
    down: bool = False
    pieces: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    def boxes(self, name: str, shape: Shape) -> Iterator[tuple[Box, Box]]:
        """Yield boxes of the whole tensor with ``shape``, and their places in the local tensor.

        Nothing for a replicated tensor, except on the first rank; then the whole tensor.
        """
        zero = (0,) * len(shape)
        if (pieced := PIECED.search(name)) and (pieces := self._pieces(name)):
            at = 0
            for place in (PIECES if len(pieces) < 6 else DELTA_PIECES)[pieced[1]]:
                rows = pieces[place] // self.size
                local = Box((at, *zero[1:]), (at + rows, *shape[1:]))
                first = sum(pieces[:place]) + self.rank * rows
                yield local.shifted((first - at, *zero[1:])), local
                at += rows
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

    def _pieces(self, name: str) -> tuple[int, ...]:
        """The rows of the pieces of the layer of the tensor ``name``; none if it is not in a layer with a mixer."""
        layer = LAYER.fullmatch(name)
        return self.pieces.get(int(layer[2]), ()) if layer is not None and layer[1] == "decoder" else ()

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
        found = []
        for whole, box in self.boxes(name, self.whole_shape(name, local)):
            if expert is None:
                found.append(TensorPart(whole, lambda box=box: read()[box.index]))  # type: ignore[misc]
            else:
                stacked = Box((expert, *whole.start), (expert + 1, *whole.stop))
                found.append(TensorPart(stacked, lambda box=box: read()[box.index][None]))  # type: ignore[misc]
        return found


@dataclass(frozen=True)
class Sizes:
    """The model-parallel sizes of a stored training."""

    tp: int
    pp: int
    ep: int
    etp: int

    @classmethod
    def of(cls, arguments: Mapping[str, object]) -> Sizes:
        """Read them from the arguments of the training."""
        names = [
            f"{name}_parallel_size" for name in ("tensor_model", "pipeline_model", "expert_model", "expert_tensor")
        ]
        given = []
        for name in names:
            value = arguments.get(name) or 0
            if not isinstance(value, int) or value < 0:
                raise CheckpointError(f"{name} of the checkpoint is {quoted(value)}; it must be an integer >= 1")
            given.append(value)
        tp, pp, ep, etp = given
        return cls(max(tp, 1), max(pp, 1), max(ep, 1), etp or max(tp, 1))
