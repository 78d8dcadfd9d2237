"""Names of Megatron Core's layers with mixers, and the parts in which it stores the projections of these."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from megatron_core.config import ModelConfig
from megatron_core.config.megatron_model import unlike_delta_net
from megatron_core.config.mixers import GatedDeltaNet, Mamba2, Recurrence
from megatron_core.errors import CheckpointError
from megatron_core.hub.megatron_lm.tensor_map import LAYER, LocalSplit, TensorPart, TensorParts, whole_shape
from megatron_core.parallel.boxes import Box

MIXER = re.compile(r"(decoder\.layers\.\d+\.)(mixer|self_attention)\.(.+)")
"""Names of a layer with a Mamba-2 mixer, and of a layer with a gated delta net or attention."""
ORDER = {"x": 0, "B": 1, "C": 2, "z": 3, "dt": 4}
"""Megatron Core's names of the pieces of a projection and of the convolution -> their places here (``Mamba2.pieces``);
in its own matrices z is the first."""
DELTA_ORDER = {name: place for place, name in enumerate(("query", "key", "value", "z", "beta", "alpha"))}
"""The same of a gated delta net, whose pieces have the same order in both."""
PIECE = re.compile(rf"(in_proj\.weight|conv1d\.weight|conv1d\.bias)\.({'|'.join({**ORDER, **DELTA_ORDER})})")
RENAMED = {"in_proj.layer_norm_weight": "input_layernorm.weight", "in_proj.layer_norm_bias": "input_layernorm.bias"}
"""The norm before a mixer, which Transformer Engine fuses into the projection."""
CONVOLUTION = re.compile(r"^conv1d_")
"""Start of the names of the convolution's parameters in Megatron Core 0.19.2; elsewhere the convolution is a module."""
PLAIN_NORM = re.compile(r"(decoder\.layers\.\d+\.)norm\.(weight|bias)")
"""The norm before a mixer without Transformer Engine."""
OURS = re.compile(r"(.*?)decoder\.(?:layers\.(\d+)\.(.+)|final_layernorm\.(?:weight|bias))")
"""Names of our tensors of a layer, or of the final norm, after the prefix of a kind."""
PIECED = ("in_proj.weight", "conv1d.weight", "conv1d.bias")
FINAL = {f"decoder.final_norm.{kind}": f"decoder.final_layernorm.{kind}" for kind in ("weight", "bias")}
OWN_NORM = re.compile(r".*\.self_attention\.out_norm")
"""The norm of outputs of a delta net, whose weight here is the factor, also with ``apply_layernorm_1p``."""


class StoredMixer(NamedTuple):
    """How Megatron Core stores a kind of mixer."""

    module: str
    """Its name of the mixer."""
    order: dict[str, int]
    """Its names of the pieces -> their places here."""
    norm: str
    """Our name of the norm of outputs; there it is a module with a weight."""
    kind: type[Recurrence]


STORED = {
    Mamba2.name: StoredMixer("mixer", ORDER, "norm", Mamba2),
    GatedDeltaNet.name: StoredMixer("self_attention", DELTA_ORDER, "out_norm", GatedDeltaNet),
}
"""The mixers by kind."""
NORMS = {f"{mixer.module}.{mixer.norm}.weight": mixer.norm for mixer in STORED.values()}


def has_other_names(model: ModelConfig) -> bool:
    """Whether names of the model's tensors are not those of a model with attention in each layer."""
    return model.hybrid_layer_pattern is not None or bool(rows_of_ranks(model))


def our_name(name: str) -> str:
    """Translate the name of a tensor of a model with mixers, without the name of its piece, to ours."""
    if (plain := PLAIN_NORM.fullmatch(name)) is not None:
        return f"{plain[1]}input_layernorm.{plain[2]}"
    if (mixer := MIXER.fullmatch(name)) is None:
        return FINAL.get(name, name)
    rest = CONVOLUTION.sub("conv1d.", mixer[3])
    return mixer[1] + RENAMED.get(rest, "self_attention." + NORMS.get(f"{mixer[2]}.{rest}", rest))


def with_mixers(found: TensorParts, model: ModelConfig) -> TensorParts:
    """Return the parts of a model with mixers under our names, with the rows of each piece in their place."""
    if not has_other_names(model):
        return found
    named = TensorParts()
    kinds = {mixer.module: mixer for mixer in STORED.values()}
    for name, parts in found.items():
        whole = name
        if (mixer := MIXER.fullmatch(name)) is not None and (piece := PIECE.fullmatch(mixer[3])) is not None:
            whole, kind = f"{mixer[1]}{mixer[2]}.{piece[1]}", kinds[mixer[2]]
            if piece[2] not in kind.order:
                raise CheckpointError(f"{name} is not a piece of a projection of {kind.kind.name}")
            first = sum(kind.kind(model).pieces[: kind.order[piece[2]]])
            parts = [replace(part, box=part.box.shifted((first, *(0 for _ in part.box.shape[1:])))) for part in parts]
        named.setdefault(our_name(whole), []).extend(parts)
    return named


def in_our_order(found: TensorParts, model: ModelConfig, ranks: int) -> TensorParts:
    """Return ``found`` with the rows of whole projections of mixers, stored as those of ``ranks`` tensor-parallel ranks
    one after another, in our order."""
    rows, named = rows_of_ranks(model), TensorParts()
    for name, parts in found.items():
        ours = our_name(name)
        layer = LAYER.fullmatch(ours)
        is_whole = layer is not None and layer[3].removeprefix("self_attention.") in PIECED and int(layer[2]) in rows
        if is_whole:
            parts = [moved for part in parts for moved in _moved(part, ours, whole_shape(parts), ranks, rows)]
        named[name] = parts
    return named


def _moved(
    part: TensorPart, name: str, shape: tuple[int, ...], ranks: int, rows: dict[int, tuple[int, ...]]
) -> Iterator[TensorPart]:
    """Yield the pieces of a part of the tensor ``name``."""
    for rank in range(ranks):
        for whole, local in LocalSplit(rank, ranks, gated=False, pieces=rows).boxes(name, shape):
            stored = local.shifted((rank * (shape[0] // ranks), *(0 for _ in shape[1:])))
            common = part.box.intersect(stored)
            if common is not None:
                at = common.within(part.box)
                shift = tuple(a - b for a, b in zip(whole.start, stored.start, strict=True))
                yield TensorPart(common.shifted(shift), lambda at=at: part.read()[at])  # type: ignore[misc]


def pieces_of_mixer(
    name: str, shape: tuple[int, ...], box: Box, model: ModelConfig
) -> Iterator[tuple[str, tuple[int, ...], Box, Box]]:
    """Yield the parts of ``box`` of our tensor ``name`` in Megatron Core: its name and shape there, the part's place in
    it, and the part in our tensor. One part for a tensor that is not stored in pieces."""
    match = OURS.fullmatch(name) if has_other_names(model) else None
    if match is None:
        yield name, shape, box, box
        return
    prefix, number, rest = match[1], match[2], match[3]
    if number is None:
        final = "final_layernorm" if model.hybrid_layer_pattern is None else "final_norm"
        yield f"{prefix}decoder.{final}.{name.rpartition('.')[2]}", shape, box, box
        return
    mixer = stored_mixer(model, int(number))
    if mixer is None or not rest.startswith(("self_attention.", "input_layernorm.")):
        yield name, shape, box, box
        return
    prefix, rest = f"{prefix}decoder.layers.{number}.{mixer.module}.", rest.removeprefix("self_attention.")
    if rest not in PIECED:
        theirs = {ours: name for name, ours in RENAMED.items()} | {mixer.norm: f"{mixer.norm}.weight"}
        yield prefix + theirs.get(rest, rest), shape, box, box
        return
    sizes, zero = mixer.kind(model).pieces, (0,) * (len(shape) - 1)
    for piece, place in mixer.order.items():
        first, size = sum(sizes[:place]), sizes[place]
        part = box.intersect(Box((first, *zero), (first + size, *shape[1:])))
        if part is not None:
            yield f"{prefix}{rest}.{piece}", (size, *shape[1:]), part.shifted((-first, *zero)), part


def stored_mixer(model: ModelConfig, layer: int) -> StoredMixer | None:
    """The mixer of a layer; None: it has none."""
    return STORED.get(model.recurrence_of(layer) or "")


def rows_of_ranks(model: ModelConfig) -> dict[int, tuple[int, ...]]:
    """The rows of the pieces of each layer's mixer, in our order, for ``LocalSplit``."""
    mixers = {layer: stored_mixer(model, layer) for layer in range(model.num_layers)}
    return {layer: mixer.kind(model).pieces for layer, mixer in mixers.items() if mixer is not None}


def check_delta_nets(model: ModelConfig, folder: object) -> None:
    """``CheckpointError`` if the model has gated delta nets that compute something else here."""
    if settings := unlike_delta_net(model):
        raise CheckpointError(
            f"{folder} was trained with {', '.join(settings)}: gates and norms of gated delta nets would be others here"
        )


def norm_offset(name: str, model: ModelConfig) -> float:
    """Our weight ``name`` minus that of Megatron Core, which applies ``apply_layernorm_1p`` to all norms."""
    return float(model.apply_layernorm_1p and OWN_NORM.fullmatch(name) is not None)


def with_offsets(found: TensorParts, model: ModelConfig) -> TensorParts:
    """Return the parts of weights, or of main weights, with those of delta nets' norms as they are here."""
    changed = {
        name: [TensorPart(part.box, lambda read=part.read: read().float() + 1) for part in parts]  # type: ignore[misc]
        for name, parts in found.items()
        if norm_offset(name, model)
    }
    return found | changed
