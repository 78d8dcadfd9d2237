"""Typical code of Megatron Core's users runs unchanged."""

from __future__ import annotations

import torch

from megatron_core import tensor_parallel
from megatron_core.verify.ranks import run_ranks


def _example() -> None:
    x = torch.ones(2, 1, 1024)

    from megatron_core import parallel_state as mpu
    from megatron_core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    mpu.initialize_model_parallel(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    up = ColumnParallelLinear(1024, 4096, bias=True, gather_output=False)
    down = RowParallelLinear(4096, 1024, bias=True, input_is_parallel=True)
    out, bias = down(torch.nn.functional.gelu(up(x)[0]))

    assert out.shape == x.shape and bias is None
    assert up.weight.shape == (2048, 1024) and down.weight.shape == (1024, 2048)
    out.sum().backward()
    assert up.weight.grad.abs().sum() > 0


def test_example_of_the_documentation() -> None:
    run_ranks(4, _example)


def test_mappings_use_the_current_group() -> None:
    """All of Megatron Core's mappings take the input alone; without torch.distributed they return it."""
    mappings = [name for name in dir(tensor_parallel) if name.endswith("_region")]
    assert len(mappings) == 9
    x = torch.randn(4, 2, 4)
    for name in mappings:
        assert torch.equal(getattr(tensor_parallel, name)(x), x)


def _check_mappings() -> None:
    from megatron_core import parallel_state as mpu

    mpu.initialize_model_parallel(2, 2)
    index = mpu.get_tensor_model_parallel_rank()
    x = torch.full((2, 2), float(index), requires_grad=True)
    gathered = tensor_parallel.gather_from_sequence_parallel_region(x)
    assert gathered[:, 0].tolist() == [0.0, 0.0, 1.0, 1.0]
    gathered.sum().backward()
    assert x.grad.tolist() == [[2.0, 2.0], [2.0, 2.0]], "the gradient is summed over the group"
    x.grad = None
    tensor_parallel.gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=False).sum().backward()
    assert x.grad.tolist() == [[1.0, 1.0], [1.0, 1.0]], "the gradient is whole already"


def test_mappings_over_a_part_of_the_world() -> None:
    run_ranks(4, _check_mappings)
