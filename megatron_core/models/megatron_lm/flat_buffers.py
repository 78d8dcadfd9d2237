"""Adam's state in the flat buffers of Megatron Core's distributed optimizer (``dp_reshardable``, its default).

Each model-parallel rank stores its parameters in reverse order of registration, each at a multiple of 64 elements. The
buffers also contain the main weights, so that comparing them with the weights verifies the order.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from math import prod

import torch
from torch import Tensor

ALIGNMENT = 64
KINDS = ("param", "exp_avg", "exp_avg_sq")
BUFFER = re.compile(r"optimizer\.distributed\.dp_group_idx_(\d+)\.gbuf_idx_(\d+)\.dtype_(.*)\.bucket_idx_(\d+)\.param")
_REST = [
    *("self_attention.linear_qkv", "self_attention.q_layernorm", "self_attention.k_layernorm"),
    *("pre_mlp_layernorm", "mlp.linear_fc1", "mlp.linear_fc2"),
]
ORDERS = (
    ["input_layernorm", "self_attention.linear_proj", *_REST],
    ["self_attention.linear_proj", "input_layernorm", *_REST],
)
"""Registration order of a layer's modules: local layers, layers of Transformer Engine."""
Shapes = Mapping[str, tuple[int, ...]]


def buckets_of(names: Iterable[str]) -> dict[int, list[str]]:
    """Prefixes of the buckets of each model-parallel rank; empty if a rank has several buffers or dtypes."""
    found: dict[int, list[tuple[int, str]]] = {}
    kinds = set()
    for name in names:
        match = BUFFER.fullmatch(name)
        if match is not None:
            found.setdefault(int(match[1]), []).append((int(match[4]), name.removesuffix("param")))
            kinds.add((match[2], match[3]))
    return {rank: [name for _, name in sorted(each)] for rank, each in found.items()} if len(kinds) == 1 else {}


def registered(shapes: Shapes, order: list[str], layers: range, *, first: bool, last: bool) -> list[str]:
    """Names of a stage's parameters in order of registration."""
    names = ["embedding.word_embeddings.weight", "embedding.position_embeddings.weight"] * first
    for layer in layers:
        for module in order:
            names += [f"decoder.layers.{layer}.{module}.{kind}" for kind in ("weight", "bias")]
    names += ["decoder.final_layernorm.weight", "decoder.final_layernorm.bias", "output_layer.weight"] * last
    return [name for name in names if name in shapes]


def slices(names: list[str], shapes: Shapes, sizes: list[int]) -> dict[str, tuple[int, int]] | None:
    """Bucket and offset of each parameter in buckets of ``sizes`` elements; None if the sizes do not fit."""
    found, bucket, end = {}, 0, 0
    for name in reversed(names):
        start = -(-end // ALIGNMENT) * ALIGNMENT
        if bucket < len(sizes) and end == sizes[bucket]:
            bucket, start = bucket + 1, 0
        end = start + prod(shapes[name])
        if bucket >= len(sizes) or end > sizes[bucket]:
            return None
        found[name] = (bucket, start)
    return found if bucket == len(sizes) - 1 and end == sizes[bucket] else None


def split(
    names: list[str], shapes: Shapes, buckets: Mapping[str, list[Tensor]], weight: Callable[[str], Tensor]
) -> dict[str, dict[str, Tensor]] | None:
    """Tensors of each kind by parameter; None if the buffers have another order of parameters."""
    places = slices(names, shapes, [tensor.numel() for tensor in buckets["param"]])
    if places is None:
        return None
    found: dict[str, dict[str, Tensor]] = {kind: {} for kind in KINDS}
    for name, (bucket, start) in places.items():
        for kind in KINDS:
            flat = buckets[kind][bucket]
            found[kind][name] = flat[start : start + prod(shapes[name])].view(shapes[name])
        own = weight(name)
        if not torch.equal(found["param"][name].to(own.dtype), own):
            return None
    return found
