"""Exact sums do not depend on the order of their addends."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from megatron_core.features.equal_bits.exact_sum import (
    LOSS_UNIT,
    RANGE,
    UNIT,
    add_exactly_,
    add_rows_exactly_,
    exact_loss_sum,
    exact_squares,
    rounded_exactly,
    scale_gradient,
    sum_of_squares,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_any_order_and_grouping_gives_the_same_bits(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    rows = (torch.randn(500, 7, generator=generator) * 10.0 ** torch.randint(-9, 0, (500, 7), generator=generator)).to(
        dtype
    )
    terms, whole = len(rows), torch.zeros(7, dtype=torch.float64)
    add_rows_exactly_(whole, rows, terms)
    expected = [sum(Fraction(float(each)) for each in rounded_exactly(column, terms)) for column in rows.t()]
    assert [Fraction(float(each)) for each in whole] == expected
    assert torch.allclose(whole, rows.double().sum(0), rtol=0, atol=len(rows) * UNIT)
    parts = torch.zeros(3, 7, dtype=torch.float64)
    for place, row in enumerate(rows[torch.randperm(len(rows), generator=generator)]):
        add_exactly_(parts[place % 3], row, terms)
    assert torch.equal(parts[2] + parts[0] + parts[1], whole)


def test_addends_beyond_the_limit_are_nan() -> None:
    values = torch.tensor([1.0, -1.0, 1.5, -2.0, math.inf, math.nan])
    assert rounded_exactly(values, int(RANGE)).isnan().tolist() == [False, False, True, True, True, True]
    assert rounded_exactly(torch.tensor([RANGE / 4]), 1).item() == RANGE / 4


def test_loss_sum_and_its_gradient() -> None:
    losses = torch.tensor([3.1, 0.2, 7.7], requires_grad=True)
    total = scale_gradient(exact_loss_sum(losses, 8), torch.tensor(0.25, dtype=torch.float64))
    total.backward()
    assert losses.grad is not None and losses.grad.tolist() == [0.25] * 3
    assert total.item() == pytest.approx(sum(losses.tolist()), abs=3 * LOSS_UNIT) and total.dtype == torch.float64
    assert exact_loss_sum(torch.tensor([2.0**30]), 8).isnan()


def test_squares_over_any_division() -> None:
    values = torch.randn(70_001, generator=torch.Generator().manual_seed(2))
    scale = 2.0 ** math.frexp(float(values.abs().max()))[1]
    whole = exact_squares([values], scale)
    pieces = [exact_squares(list(part.split(1000)), scale) for part in values.flip(0).split(9999)]
    assert torch.equal(sum(pieces), whole)
    assert sum_of_squares(whole, scale).item() == pytest.approx(math.fsum(float(x) ** 2 for x in values), rel=1e-13)
    assert exact_squares([], 1.0).tolist() == [0, 0]
    same = values.double()
    assert torch.equal(exact_squares([same], scale), whole) and torch.equal(same, values.double())
