"""Kernels at unusual sizes against the references in float64: width 1, a vocabulary of 1, more rows than a GPU's second
grid dimension takes, and addresses one element off 16 bytes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from benchmarks.op_cases import cross_entropy, random
from megatron_core import ops
from megatron_core.features.fp8.casts import COLUMNS, E4M3, ROWS, WHOLE, Blocks, quantise_orders
from tests.ops.checks import assert_near
from tests.ops.run_all import off_16_bytes
from tests.sample import WHOLE_MATRIX

MANY = 70_000
# On the CPU a GPU's threads run in turn, so that many rows take seconds.
LONG = [(MANY, 1), (1, MANY)] if WHOLE_MATRIX else []
SHAPES = [(3, 1), (5, 2), (4, 33), *LONG[:1]]
CASES: dict[str, tuple[Callable[..., Tensor], Callable[[int, int], list[Tensor]]]] = {
    "rms_norm": (lambda x, w, **of: ops.rms_norm(x, w, **of), lambda rows, n: [numbers(rows, n), numbers(n)]),
    "layer_norm": (
        lambda x, w, b, **of: ops.layer_norm(x, w, b, **of),
        lambda rows, n: [numbers(rows, n), numbers(n), numbers(n)],
    ),
    "softmax": (
        lambda x, mask, **of: ops.attention_softmax(x, mask, scale=0.5, causal=False, **of),
        lambda rows, n: [numbers(1, rows, n), torch.arange(n) % 7 == 3],
    ),
    "causal softmax": (
        lambda x, **of: ops.attention_softmax(x, None, scale=0.5, causal=True, **of),
        lambda rows, n: [numbers(rows, 1, n)],
    ),
    "rope": (
        lambda x, cos, sin, **of: ops.rope(x, cos, sin, **of),
        lambda rows, n: [numbers(rows, 1, 1, 2 * n), *(numbers(rows, 1, n).detach() for _ in range(2))],
    ),
    "activation": (
        lambda x, b, **of: ops.bias_activation(x, b, "swiglu", **of),
        lambda rows, n: [numbers(rows, 2 * n), numbers(2 * n)],
    ),
    "cross_entropy": (cross_entropy, lambda rows, n: [numbers(rows, n), torch.arange(rows) % n]),
}


def numbers(*shape: int) -> Tensor:
    torch.manual_seed(sum(shape))
    return random(*shape, dtype=torch.float32)


def outputs(function: Callable[..., Tensor], tensors: list[Tensor], backend: str) -> list[Tensor]:
    """The output, and the gradients of inputs that require one."""
    y = function(*tensors, backend=backend)
    wanted = [x for x in tensors if x.requires_grad]
    grad = torch.linspace(-1, 2, y.numel(), dtype=torch.float64).to(y.dtype).view_as(y)
    return [y, *torch.autograd.grad(y, wanted, grad)]


@pytest.mark.parametrize("is_off", [False, True], ids=["aligned", "off"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_operations(kernels: str, case: str, shape: tuple[int, int], is_off: bool) -> None:
    function, make = CASES[case]
    tensors = make(*shape)
    wide = [
        x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x.clone() for x in tensors
    ]
    if is_off:
        tensors = [off_16_bytes(x) if x.is_floating_point() else x for x in tensors]
    # The gradient of a norm over one number is 0, a difference of numbers that are rounded.
    for result, expected in zip(
        outputs(function, tensors, "native"), outputs(function, wide, "reference"), strict=True
    ):
        assert_near([result], [expected], 3e-6, slack=1e-5 * expected.numel() ** 0.5)


@pytest.mark.parametrize("is_off", [False, True], ids=["aligned", "off"])
@pytest.mark.parametrize("shape", [*SHAPES, *LONG[1:]], ids=str)
def test_dropout(kernels: str, shape: tuple[int, int], is_off: bool) -> None:
    """The mask is a function of the position alone, so that float64 drops the same elements."""
    rows, n = shape
    tensors = [numbers(rows, 1, n), numbers(n), numbers(rows, 1, n)]
    sample = torch.tensor([3])

    def drop(*inputs: Tensor, backend: str) -> Tensor:
        x, bias, residual = inputs
        return ops.bias_dropout_add(x, bias, residual, 0.3, 5, sample, backend=backend)

    wide = [x.detach().double().requires_grad_() for x in tensors]
    found = outputs(drop, [off_16_bytes(x) for x in tensors] if is_off else tensors, "native")
    assert_near(found, outputs(drop, wide, "reference"), 3e-6, slack=1e-5)


@pytest.mark.parametrize("orders", [(WHOLE, WHOLE), (ROWS, COLUMNS), (Blocks(1, 128), Blocks(128, 1))], ids=str)
@pytest.mark.parametrize("shape", [(3, 1), (129, 257), *LONG], ids=str)
def test_casts(kernels: str, shape: tuple[int, int], orders: tuple[Blocks, Blocks]) -> None:
    """Within half a step of e4m3 of the matrix in float64."""
    x = off_16_bytes(numbers(*shape)).detach()
    casts = quantise_orders(x, E4M3, {"rows": orders[0], "columns": orders[1]}, backend="native")
    for cast in casts.values():
        error = (cast.dequantised(torch.float64) - x.double()).abs()
        assert (error <= x.double().abs() * 2.0**-4 + x.abs().max().double() * 2.0**-9).all()


@pytest.mark.parametrize("is_off", [False, True], ids=["aligned", "off"])
def test_lists_of_tensors(kernels: str, is_off: bool) -> None:
    sizes = (1, 16_385, *[3] * 70)
    place = off_16_bytes if is_off else torch.clone
    grads, weights, averages = ([numbers(size).detach() for size in sizes] for _ in range(3))
    squares = [numbers(size).detach().square() for size in sizes]
    lists = [[place(x).detach() for x in values] for values in (grads, weights, averages, squares)]
    wide = [[x.double() for x in values] for values in (grads, weights, averages, squares)]
    rates = {"step": 3, "lr": 1e-2, "betas": (0.9, 0.95), "epsilon": 1e-8, "weight_decay": 0.1, "factor": 0.5}
    norms = []
    for values, backend in ((lists, "native"), (wide, "reference")):
        norms.append(ops.squared_norm(values[0], backend=backend).double())
        ops.scale_(values[0], 0.5, backend=backend)
        ops.adamw_(*values, **rates, backend=backend)
    assert_near(norms[:1], norms[1:], 1e-6)
    for found, expected in zip(lists[1:], wide[1:], strict=True):
        assert_near(found, expected, 3e-6, slack=1e-6)
