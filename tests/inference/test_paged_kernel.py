"""The native kernel of attention to blocks, compared with the formula in float64."""

from __future__ import annotations

import pytest
import torch

from megatron_core.inference.paged_attention import has_native_paged_attention, native_paged_attention

BOUNDS = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""A few roundings of numbers near 1."""


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("window", [None, 3, 9])
@pytest.mark.parametrize(
    ("heads", "groups", "channels", "values"), [(4, 2, 24, 24), (3, 3, 5, 5), (6, 1, 72, 70), (2, 2, 64, 64)]
)
def test_native_attention_is_the_formula(
    dtype: torch.dtype, window: int | None, heads: int, groups: int, channels: int, values: int
) -> None:
    """Texts of all lengths in scattered blocks; the first rows have common blocks, and other memory is not read."""
    random = torch.Generator().manual_seed(3)
    size, lengths = 4, torch.tensor([13, 14, 14, 16, *range(1, 17), 5])
    rows, width = len(lengths), 4
    tables = torch.randperm(rows * width, generator=random).reshape(rows, width)
    tables[:4, :2] = tables[0, :2]
    query, keys, memory = (
        torch.randn(*shape, generator=random, dtype=torch.float64).to(dtype)
        for shape in ((rows, heads, channels), (rows * width, size, groups, channels), (rows * width, size, groups, 96))
    )
    value = memory[..., :values]  # strided
    for row, length in enumerate(lengths.tolist()):
        for position in range(length, width * size):
            if row > 3:
                keys[tables[row, position // size], position % size] = torch.nan
    assert has_native_paged_attention(query, "auto") and not has_native_paged_attention(query, "reference")
    found = native_paged_attention(query, keys, value, tables, lengths, window=window)
    for row, length in enumerate(lengths.tolist()):
        first = 0 if window is None else max(length - window, 0)
        own = (x[tables[row]].flatten(0, 1)[first:length].double() for x in (keys, value))
        key, weighted = (x.repeat_interleave(heads // groups, dim=1).transpose(0, 1) for x in own)
        scores = query[row].double()[:, None] @ key.transpose(1, 2) / channels**0.5
        expected = (scores.softmax(-1) @ weighted)[:, 0]
        torch.testing.assert_close(found[row].double(), expected, atol=BOUNDS[dtype], rtol=BOUNDS[dtype])
