"""Each pair's forward is the named collective, and its backward is the adjoint of that linear map over all ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_core.errors import LayoutError
from megatron_core.parallel import collectives
from megatron_core.parallel.groups import Group, LocalGroup
from megatron_core.verify.ranks import run_ranks

SHAPE = (8, 3, 4)
SHAPES = ((8, 4), SHAPE, (4, 2, 3, 8))


@dataclass(frozen=True)
class Pair:
    """A pair and its forward in plain arithmetic: (inputs of all members, index in the group) -> output there.

    ``whole_in`` and ``whole_out``: the tensor is equal on all members, so that a scalar product over all ranks counts
    it once; otherwise every member has a different tensor.
    """

    op: Callable[[Tensor, Group], Tensor]
    expected: Callable[[list[Tensor], int], Tensor]
    whole_in: bool = False
    whole_out: bool = False


def _chunk(x: Tensor, index: int, parts: int, dim: int) -> Tensor:
    return x.chunk(parts, dim)[index]


GATHER_PARTIAL = partial(collectives.paired, name="gather_last", adjoint="reduce_scatter_last")
REDUCE_SCATTER = partial(collectives.paired, name="reduce_scatter_last", adjoint="gather_last")
PAIRS = {
    "copy": Pair(collectives.copy_to_region, lambda xs, i: xs[i], whole_in=True),
    "reduce": Pair(collectives.reduce_from_region, lambda xs, i: sum(xs), whole_out=True),
    "scatter channels": Pair(collectives.scatter_channels, lambda xs, i: _chunk(xs[i], i, len(xs), -1), whole_in=True),
    "gather channels": Pair(collectives.gather_channels, lambda xs, i: torch.cat(xs, -1), whole_out=True),
    "gather partial channels": Pair(GATHER_PARTIAL, lambda xs, i: torch.cat(xs, -1)),
    "reduce-scatter channels": Pair(REDUCE_SCATTER, lambda xs, i: _chunk(sum(xs), i, len(xs), -1)),
    "scatter sequence": Pair(
        collectives.scatter_to_sequence, lambda xs, i: _chunk(xs[i], i, len(xs), 0), whole_in=True
    ),
    "gather sequence": Pair(collectives.gather_from_sequence, lambda xs, i: torch.cat(xs)),
    "gather sequence, whole gradient": Pair(
        partial(collectives.gather_from_sequence, partial_grad=False), lambda xs, i: torch.cat(xs), whole_out=True
    ),
    "reduce-scatter sequence": Pair(
        collectives.reduce_scatter_to_sequence, lambda xs, i: _chunk(sum(xs), i, len(xs), 0)
    ),
}


def _random(shape: tuple[int, ...], seed: int, *, strided: bool) -> Tensor:
    """The same values with contiguous or other strides."""
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return x.transpose(0, -1).contiguous().transpose(0, -1) if strided else x


def _product(a: Tensor, b: Tensor, group: Group, *, whole: bool) -> float:
    """<a, b> over all members; tensors that are equal on all of them are counted once."""
    value = (a * b).sum()
    if whole:
        for sign in (1, -1):
            extreme = sign * value
            collectives.all_reduce_(extreme, group, maximum=True)
            torch.testing.assert_close(extreme, sign * value, rtol=1e-12, atol=0)
    else:
        value = value.clone()
        collectives.all_reduce_(value, group)
    return float(value)


def _check_pair(name: str, group: Group, shape: tuple[int, ...] = SHAPE, *, strided: bool) -> None:
    pair, size, me = PAIRS[name], group.size(), group.rank()
    inputs = [_random(shape, 0 if pair.whole_in else i, strided=strided) for i in range(size)]
    x = inputs[me].detach().requires_grad_()
    before = x.detach().clone()
    y = pair.op(x, group)
    torch.testing.assert_close(y, pair.expected(inputs, me), rtol=1e-12, atol=1e-12, msg=name)
    gradient = _random(tuple(y.shape), 100 if pair.whole_out else 100 + me, strided=strided)
    y.backward(gradient)
    assert torch.equal(x.detach(), before), f"{name} changes its input"
    forward = _product(y.detach(), gradient, group, whole=pair.whole_out)
    backward = _product(x.detach(), x.grad, group, whole=pair.whole_in)
    assert abs(forward - backward) < 1e-9, f"{name}: <Fx, y> = {forward} but <x, F*y> = {backward}"


def _check_pairs() -> None:
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]  # C50: neither the whole world nor neighbours
    alone = [dist.new_group([r]) for r in range(4)]
    for group in (dist.group.WORLD, pairs[rank % 2], alone[rank], LocalGroup()):
        for name in PAIRS:
            for strided in (False, True, group.rank() % 2 == 1):  # C22: on no, all or some ranks
                for shape in SHAPES:  # C55
                    _check_pair(name, group, shape, strided=strided)
    _check_plain(pairs[rank % 2], [rank % 2, rank % 2 + 2])
    _check_uneven(pairs[rank % 2])


def _check_plain(group: Group, members: list[int]) -> None:
    """The collectives without autograd, synchronous and asynchronous."""
    rank = dist.get_rank()
    for async_op in (False, True):
        x = torch.tensor([rank, 1.0])
        collectives.all_reduce_(x, group, async_op=async_op).wait()
        assert x.tolist() == [sum(members), 2.0]
        full = torch.zeros(4)
        collectives.all_gather_flat_(full, torch.tensor([rank, rank + 0.5]), group, async_op=async_op).wait()
        assert full.tolist() == [v for r in members for v in (r, r + 0.5)]
        shard = torch.zeros(2)
        collectives.reduce_scatter_flat_(shard, torch.arange(4.0) + rank, group, async_op=async_op).wait()
        first = 2 * group.rank()
        assert shard.tolist() == [2 * first + sum(members), 2 * (first + 1) + sum(members)]
    largest = torch.tensor(float(rank))
    collectives.all_reduce_(largest, group, maximum=True)
    assert largest == max(members)
    x = torch.tensor(float(rank))
    collectives.broadcast_(x, members[1], group)
    assert x == members[1]


def _check_uneven(group: Group) -> None:
    """An indivisible size is an error on every rank, before communication."""
    x = torch.zeros(3, 2, 3)
    for op in (
        collectives.scatter_to_sequence,
        collectives.scatter_channels,
        collectives.reduce_scatter_to_sequence,
        REDUCE_SCATTER,
    ):
        with pytest.raises(LayoutError, match="3 cannot be split over 2"):
            op(x, group)


def test_pairs_are_adjoint() -> None:
    run_ranks(4, _check_pairs)


@pytest.mark.parametrize("name", PAIRS)
def test_group_of_one_returns_its_input(name: str) -> None:
    """No process group, no communication, no copy of contiguous tensors."""
    x = torch.randn(SHAPE, requires_grad=True)
    y = PAIRS[name].op(x, LocalGroup())
    assert torch.equal(y, x)
    assert y.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    _check_pair(name, LocalGroup(), strided=True)


def _shares_memory(name: str) -> bool:
    x = torch.ones(1, 1, 4) if name.endswith("_last") else torch.ones(4, 2)
    y = torch.ops.megatron_core.collective(x, dist.group.WORLD.group_name, name, "identity", 2)
    return bool(y.untyped_storage().data_ptr() == x.untyped_storage().data_ptr())


def _shared() -> list[str]:
    return [name for name in collectives.COLLECTIVES if _shares_memory(name)]


def test_results_in_graphs_have_memory_of_their_own() -> None:
    """A compiler may reuse the memory of an input of an operator that declares no view."""
    assert run_ranks(2, _shared) == [[], []]
