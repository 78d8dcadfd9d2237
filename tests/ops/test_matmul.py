"""Products of linear layers, with oneDNN on a CPU with AVX-512: any strides of inputs, weights and biases."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_core.ops import input_grad, linear, matmul
from megatron_core.ops.matmul import MIN_MULTIPLICATIONS

ROWS, INPUTS, OUTPUTS = 64, 256, 512
BOUND = 1e-3
"""Sums of up to 512 products reach 100; each rounding of one is up to 4e-6."""


def strided(*shape: int) -> dict[str, Tensor]:
    """Matrices of a shape with different strides."""
    *rows, columns = shape
    return {
        "contiguous": torch.randn(shape),
        "part of a wide one": torch.randn(*rows, columns + 3)[..., :columns],
        "transposed": torch.randn(columns, *rows).movedim(0, -1),
        "unaligned": torch.randn(torch.Size(shape).numel() + 1)[1:].view(shape),
    }


BIASES = {"none": None, "unaligned": torch.randn(OUTPUTS + 1)[1:], "strided": torch.randn(2 * OUTPUTS)[::2]}


@pytest.mark.parametrize("is_intel", [False, True])
@pytest.mark.parametrize("bias", BIASES)
def test_linear_is_the_product_in_float64(bias: str, is_intel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "_is_intel", lambda: is_intel)
    added = BIASES[bias]
    assert 2 * ROWS * INPUTS * OUTPUTS >= MIN_MULTIPLICATIONS, "large enough for oneDNN"
    with torch.no_grad():
        inputs, weights = strided(ROWS, 2, INPUTS), strided(OUTPUTS, INPUTS)
        for form, of_weight in [*((form, "contiguous") for form in inputs), *zip(inputs, weights, strict=True)]:
            x, weight = inputs[form], weights[of_weight]
            expected = x.double() @ weight.double().t() + (0 if added is None else added.double())
            error = (linear(x, weight, added) - expected).abs().max().item()
            assert error < BOUND, (form, of_weight)
            grad = torch.randn(ROWS, 2, OUTPUTS)
            error = (input_grad(grad, weight) - grad.double() @ weight.double()).abs().max().item()
            assert error < BOUND, of_weight


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX512", reason="torch multiplies without AVX-512")
def test_mkl_multiplies_on_processors_of_intel(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, used = torch.randn(64, 512), torch.randn(512, 512), []
    monkeypatch.setattr(matmul, "_onednn_linear", lambda x, *given: used.append(x) or x)
    for is_intel in (False, True):
        monkeypatch.setattr(matmul, "_is_intel", lambda found=is_intel: found)
        with torch.no_grad():
            linear(x, weight)
            input_grad(x, weight)
        assert len(used) == 2  # both products, of the first turn only
