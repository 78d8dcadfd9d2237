"""Sample boundaries, compared with a walk through the documents."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_core.errors import DataError
from megatron_core.features.megatron_order import order as module
from megatron_core.features.megatron_order.order import build_sample_index, count_samples
from tests.features.megatron_order import reference

SIZES = st.lists(st.integers(0, 9), min_size=1, max_size=20)


@settings(max_examples=300, deadline=None)
@given(SIZES, st.data(), st.integers(1, 12), st.sampled_from([0, 1]), st.booleans(), st.sampled_from([1, 3, 2**16]))
def test_rows_are_those_of_the_walk(
    sizes: list[int], data: st.DataObject, length: int, extra: int, drop_last: bool, block: int
) -> None:
    documents = data.draw(st.lists(st.integers(0, len(sizes) - 1), min_size=1, max_size=40))
    expected = reference.sample_index(sizes, documents, length, extra, drop_last)
    tokens = sum(sizes[d] for d in documents)
    total = count_samples(tokens, length, extra, drop_last)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK", block)
        rows = build_sample_index(
            np.array(sizes, dtype=np.int32), np.array(documents, dtype=np.int32), length, total, extra
        )
    assert rows.dtype == np.int32 and rows.shape == (total + 1, 2)
    assert [tuple(row) for row in rows.tolist()] == expected


@pytest.mark.parametrize(
    ("sizes", "length", "extra", "drop_last", "expected"),
    [
        # The border at token 4 is the first token of the second document, or the end of the first one.
        ([4, 5], 4, 1, True, [[0, 0], [1, 0], [1, 4]]),
        ([4, 4], 4, 0, True, [[0, 0], [0, 4], [1, 4]]),
        # Empty documents are skipped, except in the first row.
        ([0, 4, 0, 0, 5], 4, 1, True, [[0, 0], [4, 0], [4, 4]]),
        ([0, 4, 0, 0, 4], 4, 0, True, [[0, 0], [1, 4], [4, 4]]),
        # A last sample with one token and its label, and one with only a token.
        ([4, 2], 4, 1, False, [[0, 0], [1, 0], [1, 1]]),
        ([4, 1], 4, 0, False, [[0, 0], [0, 4], [1, 1]]),
        ([4, 1], 4, 1, False, [[0, 0], [1, 0]]),
        ([3], 4, 1, True, [[0, 0]]),
    ],
)
def test_borders_at_the_ends_of_documents(
    sizes: list[int], length: int, extra: int, drop_last: bool, expected: list[list[int]]
) -> None:
    total = count_samples(sum(sizes), length, extra, drop_last)
    documents = np.arange(len(sizes), dtype=np.int32)
    rows = build_sample_index(np.array(sizes, dtype=np.int32), documents, length, total, extra)
    assert rows.tolist() == expected
    assert rows.tolist() == [list(row) for row in reference.sample_index(sizes, documents, length, extra, drop_last)]


def test_positions_past_32_bits() -> None:
    size = 2**31 - 1  # C46
    sizes = np.full(6, size, dtype=np.int32)
    documents = np.array([5, 4, 3, 2, 1, 0] * 3, dtype=np.int32)
    length = 10**9
    total = count_samples(18 * size, length, 1)
    rows = build_sample_index(sizes, documents, length, total)
    assert total == 38
    assert [entry * size + offset for entry, offset in rows.tolist()] == [i * length for i in range(39)]
    assert rows.dtype == np.int32 and rows.min() >= 0


def test_counts_past_what_32_bit_floats_hold() -> None:
    for samples in (2**24 + 1, 2**31 + 1, 10**12 + 7):  # C46
        assert count_samples(samples * 2048 + 1, 2048, 1) == samples
        assert count_samples(samples * 2048 + 1, 2048, 1, drop_last_partial=False) == samples
        assert count_samples(samples * 2048 + 2, 2048, 1, drop_last_partial=False) == samples + 1
        assert count_samples(samples * 2048 - 1, 2048, 0) == samples - 1
    assert count_samples(0, 8, 1) == count_samples(0, 8, 1, drop_last_partial=False) == 0


def test_rows_are_64_bits_wide_where_a_row_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "INT32_MAX", 5)
    sizes = np.array([3, 3], dtype=np.int32)
    narrow = build_sample_index(sizes, np.array([0, 1], dtype=np.int32), 2, 2)
    wide = build_sample_index(sizes, np.array([0, 1, 0, 1, 0, 1], dtype=np.int32), 2, 8)
    assert (narrow.dtype, wide.dtype) == (np.int32, np.int64)


def test_too_many_samples_are_refused() -> None:
    sizes = np.array([4, 4], dtype=np.int32)
    with pytest.raises(DataError, match="5 samples of 4 tokens were requested, but 8 tokens give only 1"):
        build_sample_index(sizes, np.array([0, 1], dtype=np.int32), 4, 5)
