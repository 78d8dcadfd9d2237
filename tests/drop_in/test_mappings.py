"""The collective pairs with Megatron Core's names: functions and classes, against handwritten sums and slices."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.tensor_parallel import mappings
from megatron.core.tensor_parallel.layers import (
    linear_with_frozen_weight,
    linear_with_grad_accumulation_and_async_allreduce,
)
from megatron_core import parallel_state
from megatron_core.verify.ranks import run_ranks

SIZES = [1, 3]


def matrix(rank: int, rows: int = 4, columns: int = 4) -> Tensor:
    return torch.arange(rows * columns, dtype=torch.float64).view(rows, columns) + 100.0 * rank


def gathered(parts: list[Tensor], dim: int, rank: int) -> Tensor:
    return torch.cat(parts, dim)


def summed_part(parts: list[Tensor], dim: int, rank: int) -> Tensor:
    return sum(parts).chunk(len(parts), dim)[rank]


def own_part(parts: list[Tensor], dim: int, rank: int) -> Tensor:
    return parts[rank].chunk(len(parts), dim)[rank]


def summed(parts: list[Tensor], dim: int, rank: int) -> Tensor:
    return sum(parts)


def same(parts: list[Tensor], dim: int, rank: int) -> Tensor:
    return parts[rank]


PAIRS = {
    "_CopyToModelParallelRegion": (same, summed, 0),
    "_ReduceFromModelParallelRegion": (summed, same, 0),
    "_ScatterToModelParallelRegion": (own_part, gathered, -1),
    "_GatherFromModelParallelRegion": (gathered, own_part, -1),
    "_ScatterToSequenceParallelRegion": (own_part, gathered, 0),
    "_GatherFromSequenceParallelRegion": (gathered, summed_part, 0),
    "_ReduceScatterToSequenceParallelRegion": (summed_part, gathered, 0),
    "_AllGatherFromTensorParallelRegion": (gathered, summed_part, -1),
    "_ReduceScatterToTensorParallelRegion": (summed_part, gathered, -1),
}


def pairs(name: str) -> None:
    """``symbolic``, ``apply`` and its backward, and a direct call of ``backward``, as in Megatron's tests."""
    world = torch.distributed.get_world_size()
    parallel_state.initialize_model_parallel(world)
    rank, group = torch.distributed.get_rank(), parallel_state.get_tensor_model_parallel_group()
    there, back, dim = PAIRS[name]
    kind: Any = getattr(mappings, name)
    inputs = [matrix(r) for r in range(world)]
    expected = there(inputs, dim, rank)
    x = inputs[rank].clone().requires_grad_()
    assert torch.equal(kind.symbolic(None, inputs[rank], group), expected)
    output = kind.apply(x, group)
    assert torch.equal(output, expected)
    grads = [matrix(r, *output.shape) + 7.0 for r in range(world)]
    output.backward(grads[rank])
    assert torch.equal(x.grad, back(grads, dim, rank))
    context = SimpleNamespace(group=group, tensor_parallel_output_grad=True, output_split_sizes=None)
    context.input_split_sizes = context.use_global_buffer = None
    assert torch.equal(kind.backward(context, grads[rank])[0], back(grads, dim, rank))


@pytest.mark.every_case
@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_classes_for_autograd(name: str, ranks: int) -> None:
    run_ranks(ranks, pairs, name)


REGIONS = {
    "copy_to_tensor_model_parallel_region": "_CopyToModelParallelRegion",
    "reduce_from_tensor_model_parallel_region": "_ReduceFromModelParallelRegion",
    "scatter_to_tensor_model_parallel_region": "_ScatterToModelParallelRegion",
    "gather_from_tensor_model_parallel_region": "_GatherFromModelParallelRegion",
    "scatter_to_sequence_parallel_region": "_ScatterToSequenceParallelRegion",
    "gather_from_sequence_parallel_region": "_GatherFromSequenceParallelRegion",
    "reduce_scatter_to_sequence_parallel_region": "_ReduceScatterToSequenceParallelRegion",
    "all_gather_last_dim_from_tensor_parallel_region": "_AllGatherFromTensorParallelRegion",
    "reduce_scatter_last_dim_to_tensor_parallel_region": "_ReduceScatterToTensorParallelRegion",
}


def regions() -> None:
    parallel_state.initialize_model_parallel(2)
    rank = torch.distributed.get_rank()
    for function, pair in REGIONS.items():
        there, back, dim = PAIRS[pair]
        inputs = [matrix(r) for r in range(2)]
        x = inputs[rank].clone().requires_grad_()
        output = getattr(mappings, function)(x)
        assert torch.equal(output, there(inputs, dim, rank)), function
        grads = [matrix(r, *output.shape) + 7.0 for r in range(2)]
        output.backward(grads[rank])
        assert torch.equal(x.grad, back(grads, dim, rank)), function


def test_functions_by_default_use_the_tensor_parallel_group() -> None:
    run_ranks(2, regions)


def products() -> None:
    """Rank r has rows r of the input and columns r of the output; the gradient is that of the sum of outputs times 1,
    2, ... for each column."""
    parallel_state.initialize_model_parallel(2)
    rank = torch.distributed.get_rank()
    whole = torch.cat([matrix(r, 3) for r in range(2)]).requires_grad_()
    weights = [torch.nn.Parameter(matrix(r, 2) - 50.0) for r in range(2)]
    biases = [torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True) for _ in range(2)]
    scale = torch.tensor([1.0, 2.0], dtype=torch.float64)
    expected = [torch.nn.functional.linear(whole, w, b) for w, b in zip(weights, biases, strict=True)]
    sum((output * scale).sum() for output in expected).backward()
    for sequence_parallel in (True, False):
        x = (whole.chunk(2)[rank] if sequence_parallel else whole).detach().clone().requires_grad_()
        weight = torch.nn.Parameter(weights[rank].detach().clone())
        bias = biases[rank].detach().clone().requires_grad_()
        for frozen in (False, True):
            function = linear_with_frozen_weight if frozen else linear_with_grad_accumulation_and_async_allreduce
            x.grad = bias.grad = None
            output = function(x, weight, bias, False, not sequence_parallel, sequence_parallel)
            assert torch.equal(output, expected[rank])
            (output * scale).sum().backward()
            assert torch.equal(x.grad, whole.grad.chunk(2)[rank] if sequence_parallel else whole.grad)
            assert bias.grad is None if frozen else torch.equal(bias.grad, biases[rank].grad)
            assert torch.equal(weight.grad, weights[rank].grad)  # of the first call alone


def test_products_of_column_parallel_layers() -> None:
    run_ranks(2, products)


def uneven() -> None:
    parallel_state.initialize_model_parallel(2)
    rank, group = torch.distributed.get_rank(), parallel_state.get_tensor_model_parallel_group()
    parts = [matrix(r, rows) for r, rows in enumerate(SIZES)]
    whole = [matrix(r) for r in range(2)]
    x = parts[rank].clone().requires_grad_()
    output = mappings.gather_from_sequence_parallel_region(x, True, None, SIZES)
    assert torch.equal(output, torch.cat(parts))
    output.backward(whole[rank])
    assert torch.equal(x.grad, sum(whole).split(SIZES)[rank])
    x.grad = None
    mappings.gather_from_sequence_parallel_region(x, False, group, SIZES, True).backward(whole[rank])
    assert torch.equal(x.grad, whole[rank].split(SIZES)[rank])
    y = whole[rank].clone().requires_grad_()
    own = mappings.reduce_scatter_to_sequence_parallel_region(y, None, SIZES)
    assert torch.equal(own, sum(whole).split(SIZES)[rank])
    own.backward(parts[rank])
    assert torch.equal(y.grad, torch.cat(parts))
    z = whole[rank].clone().requires_grad_()
    sent, received = [SIZES, [2, 2]][rank], [[1, 2], [3, 2]][rank]
    found = mappings.all_to_all(group, z, received, sent)
    assert torch.equal(found, torch.cat([whole[0].split(SIZES)[rank], whole[1].split([2, 2])[rank]]))
    (found * found.detach()).sum().backward()
    assert torch.equal(z.grad, z)


def test_parts_of_different_lengths() -> None:
    run_ranks(2, uneven)


def exchanged() -> None:
    parallel_state.initialize_model_parallel(2)
    rank = torch.distributed.get_rank()
    whole = torch.cat([matrix(r, 3) for r in range(2)])
    own = mappings.all_to_all_sp2hp(matrix(rank, 3))
    assert torch.equal(own, whole.chunk(2, 1)[rank])
    assert torch.equal(mappings.all_to_all_hp2sp(own), matrix(rank, 3))


def of_experts() -> None:
    parallel_state.initialize_model_parallel(1, expert_model_parallel_size=2)
    rank = torch.distributed.get_rank()
    whole = mappings.gather_from_sequence_parallel_region_to_moe(matrix(rank))
    assert torch.equal(whole, torch.cat([matrix(0), matrix(1)]))
    assert torch.equal(mappings.reduce_scatter_to_sequence_parallel_region_from_moe(whole), 2 * matrix(rank))


def test_exchanges() -> None:
    run_ranks(2, exchanged)
    run_ranks(2, of_experts)


def test_mappings_use_the_current_group() -> None:
    """All of Megatron Core's mappings take the input alone; without torch.distributed they return it."""
    names = [name for name in dir(mappings) if name.endswith("_region")]
    assert len(names) == 9
    x = torch.randn(4, 2, 4)
    for name in names:
        assert torch.equal(getattr(mappings, name)(x), x)


def _check_mappings() -> None:
    parallel_state.initialize_model_parallel(2, 2)
    index = parallel_state.get_tensor_model_parallel_rank()
    x = torch.full((2, 2), float(index), requires_grad=True)
    gathered = mappings.gather_from_sequence_parallel_region(x)
    assert gathered[:, 0].tolist() == [0.0, 0.0, 1.0, 1.0]
    gathered.sum().backward()
    assert x.grad.tolist() == [[2.0, 2.0], [2.0, 2.0]], "the gradient is summed over the group"
    x.grad = None
    mappings.gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=False).sum().backward()
    assert x.grad.tolist() == [[1.0, 1.0], [1.0, 1.0]], "the gradient is whole already"


def test_mappings_over_a_part_of_the_world() -> None:
    run_ranks(4, _check_mappings)
