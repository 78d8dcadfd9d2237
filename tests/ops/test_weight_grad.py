"""accumulate_weight_grad_ against the sum in float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from megatron_core.ops import accumulate_weight_grad_
from tests.ops.checks import draw

TOKENS, OUTPUT, INPUT, MICROS = 96, 24, 40, 8


@pytest.fixture(params=["cpu", *(["cuda"] if torch.cuda.is_available() else [])], autouse=True)
def device(request: pytest.FixtureRequest) -> Iterator[None]:
    """Device of new tensors."""
    with torch.device(request.param):
        yield


def micro_batches(dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """The gradient of the output and the input, of each micro-batch."""
    return [
        (draw((TOKENS, OUTPUT), dtype, 2 * seed), draw((TOKENS, INPUT), dtype, 2 * seed + 1)) for seed in range(MICROS)
    ]


def exact(pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
    return sum(grad_y.double().t() @ x.double() for grad_y, x in pairs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_sum_over_micro_batches_is_as_exact_as_where_it_is_kept(dtype: torch.dtype) -> None:
    pairs, wide = micro_batches(dtype), torch.promote_types(dtype, torch.float32)
    found = torch.zeros(OUTPUT, INPUT, dtype=wide)
    for grad_y, x in pairs:
        accumulate_weight_grad_(found, grad_y, x)
    right = exact(pairs)
    assert (found - right).norm() < (1e-14 if dtype == torch.float64 else 1e-6) * right.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_no_micro_batch_is_rounded_to_16_bits(dtype: torch.dtype) -> None:
    pairs = micro_batches(dtype)
    found, rounded = torch.zeros(OUTPUT, INPUT), torch.zeros(OUTPUT, INPUT)
    for grad_y, x in pairs:
        accumulate_weight_grad_(found, grad_y, x)
        rounded += grad_y.t().matmul(x)
    right = exact(pairs)
    assert (found - right).norm() < 0.01 * (rounded - right).norm()


def test_what_was_there_stays_part_of_the_sum() -> None:
    (grad_y, x), *_ = micro_batches(torch.bfloat16)
    before = draw((OUTPUT, INPUT), torch.float32, 99)
    found = before.clone()
    accumulate_weight_grad_(found, grad_y, x)
    torch.testing.assert_close(found, before + exact([(grad_y, x)]).float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_inputs_need_not_be_contiguous(dtype: torch.dtype) -> None:  # C22
    (grad_y, x), *_ = micro_batches(dtype)
    strided = [torch.cat([part, part], 1)[:, : part.shape[1]] for part in (grad_y, x)]
    transposed = [part.t().contiguous().t() for part in (grad_y, x)]
    for views in (strided, transposed):
        assert not any(view.is_contiguous() for view in views)
        found = torch.zeros(OUTPUT, INPUT)
        accumulate_weight_grad_(found, *views)
        torch.testing.assert_close(found, exact([(grad_y, x)]).float(), rtol=1e-5, atol=1e-5)


def test_no_tokens_add_nothing() -> None:
    found = draw((OUTPUT, INPUT), torch.float32)
    before = found.clone()
    accumulate_weight_grad_(found, torch.empty(0, OUTPUT).bfloat16(), torch.empty(0, INPUT).bfloat16())
    assert torch.equal(found, before)
