"""Random ways to split a tensor, for property tests."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from megatron_core.parallel.sharding import ShardSpec, replicated, split, split_fused, split_qkv

SIZES = st.integers(1, 4)


@st.composite
def plain_splits(draw: st.DrawFn) -> list[ShardSpec]:
    """``split`` along any dim, the same spec as every rank has it."""
    size = draw(SIZES)
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    dim = draw(st.integers(0, len(shape) - 1))
    shape[dim] *= size
    return [split(tuple(shape), dim, i, size) for i in range(size)]


@st.composite
def padded_splits(draw: st.DrawFn) -> list[ShardSpec]:
    """A vocabulary whose padded extent is what divides; some ranks may hold padding alone."""
    size, part = draw(SIZES), draw(st.integers(1, 5))
    extent = draw(st.integers(1, size * part))
    shape = (extent, draw(st.integers(1, 3)))
    return [split(shape, 0, i, size, padded=size * part) for i in range(size)]


@st.composite
def fused_splits(draw: st.DrawFn) -> list[ShardSpec]:
    """Several matrices one after another, each split on its own."""
    size = draw(SIZES)
    pieces = tuple(size * n for n in draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    shape = draw(st.sampled_from([(sum(pieces),), (sum(pieces), 3)]))
    return [split_fused(shape, pieces, i, size) for i in range(size)]


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


ANY_SPLIT = st.one_of(plain_splits(), padded_splits(), fused_splits(), qkv_splits(), replicas())


def numbered(shape: tuple[int, ...]) -> np.ndarray:
    """A tensor whose elements are 1, 2, 3, ..., so that each says where it belongs."""
    return np.arange(1, int(np.prod(shape)) + 1, dtype=np.int64).reshape(shape)
