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
PLAIN_NORM = re.compile(r"(decoder\.layers\.\d+\.)norm\.(weight|bias)")
"""The norm before a mixer without Transformer Engine."""
OURS = re.compile(r"(.*?)decoder\.(?:layers\.(\d+)\.(.+)|final_layernorm\.(?:weight|bias))")
"""Names of our tensors of a layer, or of the final norm, after the prefix of a kind."""
PIECED = ("in_proj.weight", "conv1d.weight", "conv1d.bias")
FINAL = {f"decoder.final_norm.{kind}": f"decoder.final_layernorm.{kind}" for kind in ("weight", "bias")}


def with_mixers(found: TensorParts, model: ModelConfig) -> TensorParts:
    """Return the parts of a hybrid model under our names, with the rows of each piece in their place."""
    if model.hybrid_layer_pattern is None:
        return found
    sizes, named = Mamba2(model).pieces, TensorParts()
    firsts = [sum(sizes[:number]) for number in range(len(sizes))]
    for name, parts in found.items():
        ours = FINAL.get(name, name)
        if (plain := PLAIN_NORM.fullmatch(name)) is not None:
            ours = f"{plain[1]}input_layernorm.{plain[2]}"
        elif (mixer := MIXER.fullmatch(name)) is not None:
            rest = RENAMED.get(mixer[2], "self_attention." + mixer[2].replace("norm.weight", "norm"))
            if (piece := PIECE.fullmatch(mixer[2])) is not None:
                rest, first = f"self_attention.{piece[1]}", firsts[ORDER[piece[2]]]
                parts = [
                    replace(part, box=part.box.shifted((first, *(0 for _ in part.box.shape[1:])))) for part in parts
                ]
            ours = mixer[1] + rest
        named.setdefault(ours, []).extend(parts)
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


def check_format(model: ModelConfig, folder: object, *, in_pieces: bool) -> None:
    """``CheckpointError`` if a hybrid model is stored in a format without names for the pieces of its projections."""
    if model.hybrid_layer_pattern is not None and not in_pieces:
        raise CheckpointError(
            f"{folder}: hybrid_layer_pattern={model.hybrid_layer_pattern} is only read from --ckpt-format torch_dist, "
            "where the pieces of the mixers' projections have names; convert it to torch_dist with Megatron-LM"
        )
