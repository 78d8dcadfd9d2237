"""The sequences of a file as one text: correct tokens, and little memory."""

from pathlib import Path

import pytest

from megatron_core.datasets import IndexedDataset
from megatron_core.datasets.keyed_dataset import TokenText
from tests.datasets.files import FakeIndexed, write_counting


def test_any_stretch_of_any_range(tmp_path: Path) -> None:
    lengths = [3, 0, 4, 1, 0, 0, 2, 0]
    indexed = IndexedDataset(write_counting(tmp_path / "a", lengths))
    for start in range(len(lengths) + 1):
        for stop in range(start, len(lengths) + 1):
            text = TokenText(indexed, range(start, stop))
            expected = list(range(sum(lengths[:start]), sum(lengths[:stop])))
            assert len(text) == len(expected)
            for first in range(len(text) + 1):
                for count in range(len(text) - first + 1):
                    assert text.read(first, count).tolist() == expected[first : first + count]


def test_reading_past_the_text(tmp_path: Path) -> None:
    text = TokenText(IndexedDataset(write_counting(tmp_path / "a", [5, 5])), range(1))
    for first, count in [(-1, 2), (0, 6), (5, 1), (2, -1)]:
        with pytest.raises(IndexError, match="a text of 5"):
            text.read(first, count)


def test_far_sequences() -> None:
    text = TokenText(FakeIndexed([2**31 - 1] * 6), range(1, 6))  # C46
    assert len(text) == 5 * (2**31 - 1)
    far = 4 * (2**31 - 1) + 5
    assert text.read(far, 3).tolist() == [(far + 2**31 - 1 + i) % 1000 for i in range(3)]
