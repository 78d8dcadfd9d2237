"""Samples: tokens, order, and offsets beyond 32 bits."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_core.datasets import IndexedDataset, KeyedGPTDataset
from megatron_core.errors import DataError
from tests.datasets.files import FakeIndexed, write, write_counting


def starts(dataset: KeyedGPTDataset, items: range) -> list[int]:
    """The first token of each item."""
    return [int(dataset[i]["tokens"][0]) for i in items]


def test_an_epoch_holds_every_token_once(tmp_path: Path) -> None:
    lengths = [7, 0, 1, 13, 0, 0, 5, 20, 0]
    indexed = IndexedDataset(write_counting(tmp_path / "a", lengths))
    dataset = KeyedGPTDataset(indexed, range(len(lengths)), sequence_length=4, seed=1)
    assert (dataset.num_tokens, dataset.samples_per_epoch) == (46, 11)
    samples = sorted((dataset[i] for i in range(11)), key=lambda sample: sample["tokens"][0])
    assert np.concatenate([sample["tokens"] for sample in samples]).tolist() == list(range(44))
    for sample in samples:
        assert sample["labels"].tolist() == (sample["tokens"] + 1).tolist()
        assert sample["loss_mask"].tolist() == [1.0] * 4
        dtypes = {key: value.dtype for key, value in sample.items()}
        assert dtypes == {"tokens": np.int64, "labels": np.int64, "loss_mask": np.float32}


def test_each_epoch_has_its_own_order(tmp_path: Path) -> None:
    indexed = IndexedDataset(write_counting(tmp_path / "a", [300]))
    dataset = KeyedGPTDataset(indexed, range(1), sequence_length=4, seed=1)
    n = dataset.samples_per_epoch
    epochs = [starts(dataset, range(epoch * n, (epoch + 1) * n)) for epoch in range(3)]
    assert len({tuple(epoch) for epoch in epochs}) == 3  # C30
    assert all(sorted(epoch) == list(range(0, 4 * n, 4)) for epoch in epochs)
    other = KeyedGPTDataset(indexed, range(1), sequence_length=4, seed=2)
    assert starts(other, range(n)) != epochs[0]


def test_an_item_does_not_depend_on_what_was_asked_before(tmp_path: Path) -> None:
    prefix = write_counting(tmp_path / "a", [50, 50])
    straight = KeyedGPTDataset(IndexedDataset(prefix), range(2), sequence_length=4, seed=1)
    expected = starts(straight, range(60))
    jumping = KeyedGPTDataset(IndexedDataset(prefix), range(2), sequence_length=4, seed=1)
    assert [starts(jumping, range(i, i + 1))[0] for i in reversed(range(60))] == expected[::-1]  # C30


def test_a_range_of_sequences(tmp_path: Path) -> None:
    indexed = IndexedDataset(write_counting(tmp_path / "a", [10, 10, 10]))
    dataset = KeyedGPTDataset(indexed, range(1, 3), sequence_length=5, seed=0)
    assert dataset.samples_per_epoch == 3
    assert sorted(starts(dataset, range(3))) == [10, 15, 20]


def test_mask_after_the_end_of_a_document(tmp_path: Path) -> None:
    indexed = IndexedDataset(write(tmp_path / "a", [[1, 2, 99], [3, 99], [4, 5, 6, 99]]))
    dataset = KeyedGPTDataset(indexed, range(3), sequence_length=8, seed=0, masked_token=99)
    sample = dataset[0]
    assert sample["tokens"].tolist() == [1, 2, 99, 3, 99, 4, 5, 6]
    assert sample["loss_mask"].tolist() == [1, 1, 0, 1, 0, 1, 1, 1]
    unmasked = KeyedGPTDataset(indexed, range(3), sequence_length=8, seed=0)
    assert unmasked[0]["loss_mask"].tolist() == [1.0] * 8


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=30), st.integers(1, 12), st.integers(0, 99))
def test_samples_for_any_lengths(lengths: list[int], sequence_length: int, seed: int) -> None:
    indexed = FakeIndexed(lengths)
    total = sum(lengths)
    if total <= sequence_length:
        with pytest.raises(DataError):
            KeyedGPTDataset(indexed, range(len(lengths)), sequence_length, seed)
        return
    dataset = KeyedGPTDataset(indexed, range(len(lengths)), sequence_length, seed)
    found = starts(dataset, range(dataset.samples_per_epoch))
    assert sorted(found) == list(range(0, total - sequence_length, sequence_length))
    for i in range(dataset.samples_per_epoch):
        sample = dataset[i]
        text = [*sample["tokens"].tolist(), int(sample["labels"][-1])]
        assert text == list(range(text[0], text[0] + sequence_length + 1))


def test_positions_past_32_bits() -> None:
    lengths = [2**31 - 1] * 6  # C46
    dataset = KeyedGPTDataset(FakeIndexed(lengths), range(6), sequence_length=1000, seed=3)
    assert dataset.num_tokens == 6 * (2**31 - 1)
    assert dataset.samples_per_epoch == (6 * (2**31 - 1) - 1) // 1000
    far = [dataset[i] for i in (0, 1, 2**31, 2**33, dataset.samples_per_epoch - 1)]
    # Samples start at multiples of 1000, where this text's tokens begin again from 0.
    assert all(sample["tokens"].tolist() == list(range(1000)) for sample in far)
    assert all(sample["labels"].tolist() == [*range(1, 1000), 0] for sample in far)


def test_too_few_tokens(tmp_path: Path) -> None:
    indexed = IndexedDataset(write_counting(tmp_path / "a", [5, 3]))
    assert KeyedGPTDataset(indexed, range(2), sequence_length=7, seed=0).samples_per_epoch == 1
    sentence = r"/a: the valid split has 8 tokens in 2 sequences, and one sample needs 9 .*--seq-length 8"
    with pytest.raises(DataError, match=sentence):
        KeyedGPTDataset(indexed, range(2), sequence_length=8, seed=0, split_name="valid")
    with pytest.raises(DataError, match="has 0 tokens in 0 sequences"):
        KeyedGPTDataset(indexed, range(0), sequence_length=8, seed=0)
    with pytest.raises(IndexError):
        KeyedGPTDataset(indexed, range(2), sequence_length=7, seed=0)[-1]
