"""Names of Megatron Core's hybrid models, and the parts in which it stores the projections of Mamba-2 mixers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from megatron_core.config import ModelConfig
from megatron_core.config.mixers import Mamba2
from megatron_core.errors import CheckpointError
from megatron_core.models.megatron_lm.tensor_map import TensorParts
from megatron_core.parallel.boxes import Box

MIXER = re.compile(r"(decoder\.layers\.\d+\.)mixer\.(.+)")
PIECE = re.compile(r"(in_proj\.weight|conv1d\.weight|conv1d\.bias)\.(x|B|C|z|dt)")
ORDER = {"x": 0, "B": 1, "C": 2, "z": 3, "dt": 4}
"""Megatron Core's names of the pieces of a projection and of the convolution -> their places here (``Mamba2.pieces``);
in its own matrices z is the first."""
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


def our_name(name: str) -> str:
    """Translate the name of a tensor of a hybrid model, without the name of its piece, to ours."""
    if (plain := PLAIN_NORM.fullmatch(name)) is not None:
        return f"{plain[1]}input_layernorm.{plain[2]}"
    if (mixer := MIXER.fullmatch(name)) is None:
        return FINAL.get(name, name)
    rest = CONVOLUTION.sub("conv1d.", mixer[2])
    return mixer[1] + RENAMED.get(rest, "self_attention." + ("norm" if rest == "norm.weight" else rest))


def with_mixers(found: TensorParts, model: ModelConfig) -> TensorParts:
    """Return the parts of a hybrid model under our names, with the rows of each piece in their place."""
    if model.hybrid_layer_pattern is None:
        return found
    sizes, named = Mamba2(model).pieces, TensorParts()
    firsts = [sum(sizes[:number]) for number in range(len(sizes))]
    for name, parts in found.items():
        whole = name
        if (mixer := MIXER.fullmatch(name)) is not None and (piece := PIECE.fullmatch(mixer[2])) is not None:
            whole, first = f"{mixer[1]}mixer.{piece[1]}", firsts[ORDER[piece[2]]]
            parts = [replace(part, box=part.box.shifted((first, *(0 for _ in part.box.shape[1:])))) for part in parts]
        named.setdefault(our_name(whole), []).extend(parts)
    return named


def pieces_of_mixer(
    name: str, shape: tuple[int, ...], box: Box, model: ModelConfig
) -> Iterator[tuple[str, tuple[int, ...], Box, Box]]:
    """Yield the parts of ``box`` of our tensor ``name`` in Megatron Core: its name and shape there, the part's place in
    it, and the part in our tensor. One part for a tensor that is not stored in pieces."""
    match = OURS.fullmatch(name) if model.hybrid_layer_pattern is not None else None
    if match is None or model.hybrid_layer_pattern is None:
        yield name, shape, box, box
        return
    prefix, number, rest = match[1], match[2], match[3]
    if number is None:
        yield f"{prefix}decoder.final_norm.{name.rpartition('.')[2]}", shape, box, box
        return
    if model.hybrid_layer_pattern[int(number)] != "M":
        yield name, shape, box, box
        return
    prefix, rest = f"{prefix}decoder.layers.{number}.mixer.", rest.removeprefix("self_attention.")
    if rest not in PIECED:
        theirs = {ours: name for name, ours in RENAMED.items()} | {"norm": "norm.weight"}
        yield prefix + theirs.get(rest, rest), shape, box, box
        return
    sizes, zero = Mamba2(model).pieces, (0,) * (len(shape) - 1)
    for piece, place in ORDER.items():
        first, size = sum(sizes[:place]), sizes[place]
        part = box.intersect(Box((first, *zero), (first + size, *shape[1:])))
        if part is not None:
            yield f"{prefix}{rest}.{piece}", (size, *shape[1:]), part.shifted((-first, *zero)), part


def check_format(model: ModelConfig, folder: object, *, has_places: bool) -> None:
    """``CheckpointError`` if a hybrid model is stored in a format without places for the pieces of its projections."""
    if model.hybrid_layer_pattern is not None and not has_places:
        raise CheckpointError(
            f"{folder}: hybrid_layer_pattern={model.hybrid_layer_pattern} is only read from --ckpt-format torch_dist "
            "or torch, where the pieces of the mixers' projections have known places; convert it with Megatron-LM"
        )
