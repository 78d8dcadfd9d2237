"""The table of rotary positions against the formula, number by number."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_core.ops.rotary import rope
from megatron_core.transformer.rotary import plain_frequencies, rotary_table


@pytest.mark.parametrize("positions", [[[0, 1, 2, 3]], [[0, 1, 0, 1], [5, 1_000_003, 0, 2]]])
def test_each_pair_of_channels_turns_by_its_position(positions: list[list[int]]) -> None:
    channels, base = 6, 10_000.0
    x = torch.randn(4, len(positions), 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    turned = rope(x, *rotary_table(torch.tensor(positions), plain_frequencies(channels, base)))
    for position in range(4):
        for row, own in enumerate(positions):
            for i in range(channels // 2):
                angle = own[position] * base ** (-2 * i / channels)
                a, b = x[position, row, :, i], x[position, row, :, i + channels // 2]
                expected = torch.stack([a * math.cos(angle) - b * math.sin(angle)])
                torch.testing.assert_close(turned[position, row, :, i], expected[0], rtol=0, atol=1e-9)
    assert torch.equal(turned[..., channels:], x[..., channels:]), "further channels pass"


def test_the_table_of_a_dtype_is_the_exact_one_rounded() -> None:
    positions = torch.tensor([[0, 7, 100_000]])
    exact = rotary_table(positions, plain_frequencies(8, 10_000.0))
    narrow = rotary_table(positions, plain_frequencies(8, 10_000.0), torch.float32)
    assert exact[0].dtype == torch.float64
    assert all(torch.equal(ours, table.float()) for ours, table in zip(narrow, exact, strict=True))
