"""Typical code of Megatron Core's users runs unchanged."""

from __future__ import annotations

import torch

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
