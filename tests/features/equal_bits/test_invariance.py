"""The tree over canonical parts, in one process and over ranks."""

from __future__ import annotations

import pytest
import torch

from megatron_core.config.tree import default_parts
from megatron_core.errors import LayoutError
from megatron_core.features.equal_bits.invariance import Invariance, all_reduce_in_tree, reduce_scatter_in_tree
from megatron_core.features.equal_bits.rules import subtree_sizes
from megatron_core.parallel.grid import Grid
from megatron_core.parallel.groups import ParallelGroups
from megatron_core.parallel.tree_sum import tree_sum
from megatron_core.verify.ranks import run_ranks
from tests.sample import WHOLE_MATRIX


def _parts(count: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    return [torch.randn(8, 3, generator=generator).to(dtype) for _ in range(count)]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 6, 8, 9, 12])
def test_neighbours_are_subtrees(count: int) -> None:
    parts = _parts(count, torch.float32)
    whole = tree_sum(parts)
    for size in subtree_sizes(count):
        partial = [tree_sum(parts[at : at + size]) for at in range(0, count, size)]
        assert torch.equal(tree_sum(partial), whole)
    assert torch.equal(tree_sum([part.clone() for part in parts], torch.Tensor.add_), whole)


def test_the_order_matters() -> None:
    """Otherwise the other tests would show nothing."""
    parts = _parts(8, torch.float32)
    assert not torch.equal(tree_sum(parts), tree_sum(parts[1:] + parts[:1]))
    assert not torch.equal(tree_sum(parts), sum(parts[1:], parts[0]))


def test_sizes_of_subtrees_and_default_parts() -> None:
    assert subtree_sizes(8) == [1, 2, 4, 8] and subtree_sizes(6) == [1, 2, 6] and subtree_sizes(9) == [1, 3, 9]
    assert [default_parts(heads) for heads in (16, 12, 6, 9, 5, 1)] == [8, 4, 2, 3, 5, 1]


def _reduced(dtype_name: str) -> list[list[list[float]]]:
    dtype = getattr(torch, dtype_name)
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    group = ParallelGroups(Grid(tp=size), rank).group("tp")
    own = tree_sum(_parts(8, dtype)[rank * 8 // size : (rank + 1) * 8 // size])
    return [f(own.clone(), group).double().tolist() for f in (all_reduce_in_tree, reduce_scatter_in_tree)]


@pytest.mark.parametrize("backend", ["auto", "gloo"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", [2, 4, 8] if WHOLE_MATRIX else [2, 4])
def test_ranks_continue_the_tree(size: int, dtype: str, backend: str) -> None:
    whole = tree_sum(_parts(8, getattr(torch, dtype))).double()
    found = run_ranks(size, _reduced, dtype, backend=backend)
    assert all(reduced == whole.tolist() for reduced, _ in found)
    assert [row for _, part in found for row in part] == whole.tolist()


def test_chunks() -> None:
    invariance = Invariance(feature_parts=4, chunks=8, sequences=2, sequence_length=64)
    assert invariance.chunks_of(16)[1:3] == [slice(2, 4), slice(4, 6)]
    assert invariance.over(4).chunks_of(16) == [slice(0, 8), slice(8, 16)]
    with pytest.raises(LayoutError, match=r"12 tokens.*layout_invariant_chunks=8"):
        invariance.chunks_of(12)
