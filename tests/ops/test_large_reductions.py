"""Sums over 40 M elements in float32, to detect errors that grow with the number of elements."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from megatron_core.ops import attention_softmax, cross_entropy_parts, layer_norm, rms_norm, squared_norm
from tests.defects.plant import planted
from tests.ops.checks import draw

BACKENDS = pytest.mark.parametrize("backend", ["native", "reference"])
TIMES = 977  # 40 M elements, not a multiple of a block
BLOCK = 40_961


@pytest.fixture(autouse=True)
def native_on_cpu(cpu_kernels: None) -> None:
    """Native is csrc/cpu."""


def relative_error(found: Tensor, exact: Tensor) -> float:
    return ((found.double() - exact).norm() / exact.norm()).item()


def error_of_the_norm(backend: str, dtype: torch.dtype) -> float:
    block = draw((BLOCK,), dtype)
    norm = squared_norm([block.repeat(TIMES)], backend=backend).sqrt()
    return relative_error(norm, (TIMES * block.double().square().sum()).sqrt())


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradient_norm(backend: str, dtype: torch.dtype) -> None:
    assert error_of_the_norm(backend, dtype) < (1e-8 if dtype == torch.float32 else 1e-7)


def test_a_float32_norm_of_the_whole_tensor_is_found() -> None:
    blocks = "return x[:covered].view(-1, BLOCK), x[covered:].view(1, -1)"
    with planted("ops.reference:_blocks", blocks, "return x.view(1, -1), x[:0].view(1, -1)"):
        assert error_of_the_norm("reference", torch.float32) > 1e-3


@BACKENDS
@pytest.mark.parametrize("norm", [rms_norm, layer_norm])
def test_weight_gradients_of_norms(norm: Callable[..., Tensor], backend: str) -> None:
    """PyTorch's LayerNorm adds 40,000 rows sequentially: error 5e-6 with random rows, ten times that with these
    periodic ones. The others stay below 1e-6."""
    bound = 1e-4 if (norm, backend) == (layer_norm, "reference") else 5e-6
    times, rows, columns = 1000, 40, 1024
    x, dy = draw((rows, columns), torch.float32), draw((rows, columns), torch.float32, 1) + 0.1
    parameters = [torch.ones(columns), torch.zeros(columns)][: 2 if norm is layer_norm else 1]

    def gradients(x: Tensor, dy: Tensor, of: str) -> tuple[Tensor, ...]:
        wanted = [parameter.to(x.dtype).requires_grad_() for parameter in parameters]
        return torch.autograd.grad(norm(x, *wanted, backend=of), wanted, dy)

    found = gradients(x.repeat(times, 1), dy.repeat(times, 1), backend)
    for mine, exact in zip(found, gradients(x.double(), dy.double(), "reference"), strict=True):
        assert relative_error(mine, times * exact) < bound


@BACKENDS
def test_softmax_and_cross_entropy_over_long_rows(backend: str) -> None:
    """Rows of a million. PyTorch's softmax adds vectors sequentially: error 2e-6, ten times that with these periodic
    rows. The others stay below 1e-6."""
    rows, columns, times = 10, 1_000_000, 1000
    part = draw((rows, columns // times), torch.float32)
    logits, target = part.repeat(1, times), torch.arange(rows)
    parts = partial(cross_entropy_parts, target=target, first=0)
    found, exact = parts(logits, valid=columns, backend=backend), parts(part.double(), valid=columns // times)
    exact[[1, 3]] *= times
    for mine, right in zip(found, exact, strict=True):
        assert relative_error(mine, right) < 5e-6
    probabilities = attention_softmax(logits[:4, None], backend=backend)
    bound = 1e-4 if backend == "reference" else 5e-6
    assert relative_error(probabilities[:, 0, : columns // times], part[:4].double().softmax(-1) / times) < bound
