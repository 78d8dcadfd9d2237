"""Random ways to split a tensor, for property tests: each strategy returns the specs of all ranks."""

from __future__ import annotations

from itertools import product

import numpy as np
from hypothesis import strategies as st

from megatron_core.parallel.sharding import (
    ShardSpec,
    Split,
    replicated,
    split,
    split_fused,
    split_over,
    split_qkv,
)

SIZES = st.integers(1, 4)


@st.composite
def plain_splits(draw: st.DrawFn) -> list[ShardSpec]:
    """``split`` along any dim."""
    size = draw(SIZES)
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    dim = draw(st.integers(0, len(shape) - 1))
    shape[dim] *= size
    return [split(tuple(shape), dim, i, size) for i in range(size)]


@st.composite
def padded_splits(draw: st.DrawFn) -> list[ShardSpec]:
    """A vocabulary padded to a divisible size; some ranks may have only padding."""
    size, part = draw(SIZES), draw(st.integers(1, 5))
    extent = draw(st.integers(1, size * part))
    shape, dim = [extent, draw(st.integers(1, 3))], draw(st.integers(0, 1))
    shape = tuple(shape if dim == 0 else shape[::-1])
    return [split(shape, dim, i, size, padded=size * part) for i in range(size)]


@st.composite
def fused_splits(draw: st.DrawFn) -> list[ShardSpec]:
    """Several concatenated matrices, each split separately."""
    size, dim = draw(SIZES), draw(st.integers(0, 1))
    pieces = tuple(size * n for n in draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    shape = (3, sum(pieces)) if dim else draw(st.sampled_from([(sum(pieces),), (sum(pieces), 3)]))
    return [split_fused(shape, pieces, i, size, dim=dim) for i in range(size)]


@st.composite
def qkv_splits(draw: st.DrawFn) -> list[ShardSpec]:
    """Query heads, key and value of each group; more or fewer groups than ranks."""
    groups, size, queries = draw(st.sampled_from([(1, 1, 2), (1, 2, 2), (1, 4, 4), (2, 4, 2), (2, 2, 1), (4, 2, 3)]))
    head = draw(st.integers(1, 3))
    rows = groups * (queries + 2) * head
    shape = draw(st.sampled_from([(rows,), (rows, 2)]))
    return [split_qkv(shape, groups * queries, groups, head, i, size) for i in range(size)]


@st.composite
def replicas(draw: st.DrawFn) -> list[ShardSpec]:
    """The whole tensor on every rank."""
    shape = tuple(draw(st.lists(st.integers(1, 4), max_size=3)))
    return [replicated(shape, i) for i in range(draw(SIZES))]


@st.composite
def covers(draw: st.DrawFn, extent: int, size: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Ranges of ``size`` ranks: pieces of ``extent`` in any order, each on one rank or on several."""
    cuts = sorted(draw(st.sets(st.integers(1, extent - 1), max_size=4))) if extent > 1 else []
    pieces = list(zip([0, *cuts], [*cuts, extent], strict=True))
    ranges: list[list[tuple[int, int]]] = [[] for _ in range(size)]
    for piece in draw(st.permutations(pieces)):
        for holder in draw(st.sets(st.integers(0, size - 1), min_size=1, max_size=2)):
            ranges[holder].append(piece)
    return tuple(map(tuple, ranges))


@st.composite
def several_splits(draw: st.DrawFn, shape: tuple[int, ...] | None = None) -> list[ShardSpec]:
    """Up to three splits over up to three axes and any dims (possibly the same), and replicated axes."""
    shape = shape or tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    sizes = {axis: draw(st.integers(1, 3)) for axis in draw(st.sets(st.sampled_from(["ep", "etp", "tp"]), min_size=1))}
    splits = []
    for axis in draw(st.sets(st.sampled_from(sorted(sizes)))):
        dim = draw(st.integers(0, len(shape) - 1))
        splits.append(Split(dim, axis, draw(covers(shape[dim], sizes[axis]))))
    coordinates = product(*(range(size) for size in sizes.values()))
    return [ShardSpec(shape, tuple(splits), tuple(zip(sizes, coordinate, strict=True))) for coordinate in coordinates]


@st.composite
def expert_splits(draw: st.DrawFn) -> list[ShardSpec]:
    """Experts over ep, gate and up of each over etp."""
    ep, etp, n = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    shape, ffn = (ep * n, 2 * etp, 2), etp
    return [
        split_over(split(shape, 0, e, ep, axis="ep"), split_fused(shape, (ffn, ffn), t, etp, dim=1, axis="etp"))
        for e in range(ep)
        for t in range(etp)
    ]


ANY_SPLIT = st.one_of(
    plain_splits(), padded_splits(), fused_splits(), qkv_splits(), replicas(), expert_splits(), several_splits()
)


def numbered(shape: tuple[int, ...]) -> np.ndarray:
    """A tensor whose elements are 1, 2, 3, ..., which identifies their positions."""
    return np.arange(1, int(np.prod(shape)) + 1, dtype=np.int64).reshape(shape)
