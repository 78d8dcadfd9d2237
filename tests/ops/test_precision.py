"""No operation is less accurate than plain PyTorch in the same data type: at most twice its error."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.bench_ops import as_tuple
from benchmarks.op_cases import CASES
from tests.ops.checks import LOW, poisoned_memory


def outputs_and_gradients(op: str, inputs: list[Tensor], backend: str) -> list[Tensor]:
    """All results of forward and backward, for reproducible random gradients of the outputs."""
    outputs = as_tuple(CASES[op].function(*inputs, backend=backend))
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randn(y.shape, generator=generator, dtype=torch.float64, device="cpu") for y in outputs]
    grads = [g.to(y.device, inputs[0].dtype).to(y.dtype) for g, y in zip(drawn, outputs, strict=True)]
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    return [*(y.detach() for y in outputs), *torch.autograd.grad(outputs, wanted, grads)]


def in_double(inputs: list[Tensor]) -> list[Tensor]:
    return [x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x for x in inputs]


def check(op: str, inputs: list[Tensor]) -> None:
    exact = outputs_and_gradients(op, in_double(inputs), "reference")
    with poisoned_memory():
        native = outputs_and_gradients(op, inputs, "native")
    plain = outputs_and_gradients(op, inputs, "reference")
    for mine, theirs, right in zip(native, plain, exact, strict=True):
        assert mine.dtype == theirs.dtype
        # Plain PyTorch may be exact by chance; the bound is at least one rounding of the exact result.
        errors = ((found.double() - right).norm() for found in (theirs, right.to(theirs.dtype)))
        assert (mine.double() - right).norm() <= 2 * max(errors)


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("op", CASES)
def test_the_error_is_at_most_twice_that_of_plain_precision(kernels: str, op: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    check(op, CASES[op].inputs(48, 256, dtype))


@pytest.mark.drawn(8)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", CASES)
def test_so_it_is_with_results_of_megabytes(cpu_kernels: None, op: str, dtype: torch.dtype) -> None:
    """Sizes whose results are written past the cache."""
    torch.manual_seed(0)
    inputs = CASES[op].inputs(2048, 1024, dtype)
    assert inputs[0].nbytes >= 4 << 20
    check(op, inputs)
