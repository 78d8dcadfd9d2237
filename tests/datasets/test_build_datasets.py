"""From the data flags to the splits, and every sentence about flags and files that do not fit."""

from pathlib import Path

import numpy as np
import pytest

from megatron_core.datasets import (
    BlendedDataset,
    DatasetHeader,
    IndexedDataset,
    KeyedGPTDataset,
    build_datasets,
    write_header,
)
from megatron_core.errors import ConfigError, DataError
from megatron_core.tokenizers import ByteLevelTokenizer, NullTokenizer
from tests.datasets.files import write, write_counting


def test_default_split(tmp_path: Path) -> None:
    prefix = write_counting(tmp_path / "a", [20] * 1000)
    splits = build_datasets(data_path=[prefix], sequence_length=8, seed=3)
    assert splits.notes == ()
    indexed = IndexedDataset(prefix)
    for dataset, sequences in zip(
        (splits.train, splits.valid, splits.test),
        (range(969), range(969, 999), range(999, 1000)),
        strict=True,
    ):
        expected = KeyedGPTDataset(indexed, sequences, 8, seed=3)
        assert dataset.samples_per_epoch == expected.samples_per_epoch
        np.testing.assert_equal(dataset[1], expected[1])


def test_zero_share_and_too_few_tokens(tmp_path: Path) -> None:
    prefix = write_counting(tmp_path / "a", [20] * 40)
    splits = build_datasets(data_path=[prefix], sequence_length=30, seed=3, split="97,3,0")
    assert splits.test is None
    assert splits.valid is None
    assert len(splits.notes) == 1 and "the valid split has 20 tokens" in splits.notes[0]
    with pytest.raises(DataError, match="the train split has 780 tokens"):
        build_datasets(data_path=[prefix], sequence_length=780, seed=3, split="97,3,0")


def test_blend_with_weights(tmp_path: Path) -> None:
    prefixes = [write_counting(tmp_path / name, [20] * 100) for name in "ab"]
    data_path = ["3", prefixes[0], "1", prefixes[1]]
    splits = build_datasets(data_path=data_path, sequence_length=8, seed=3, split="1,1,0")
    assert isinstance(splits.train, BlendedDataset) and isinstance(splits.valid, BlendedDataset)
    assert splits.train.slots == (49152, 16384)


def test_a_file_too_small_for_validation_leaves_the_others(tmp_path: Path) -> None:
    large = write_counting(tmp_path / "large", [20] * 100)
    small = write_counting(tmp_path / "small", [20] * 3)
    data_path = ["1", large, "1", small, "2", large]
    splits = build_datasets(data_path=data_path, sequence_length=8, seed=3, split="9,1,0")
    assert splits.train.slots == (16384, 16384, 32768)
    assert splits.valid.slots == (21845, 43691)
    assert "small" in splits.notes[0]


def test_own_paths(tmp_path: Path) -> None:
    prefixes = [write_counting(tmp_path / name, [50]) for name in "abc"]
    splits = build_datasets(train_data_path=prefixes[:2], valid_data_path=prefixes[2:], sequence_length=8, seed=3)
    assert isinstance(splits.train, BlendedDataset)
    assert splits.valid.samples_per_epoch == 6
    assert splits.test is None
    with pytest.raises(DataError, match="the valid split has 50 tokens"):
        build_datasets(valid_data_path=prefixes[2:], sequence_length=50, seed=3)


def test_flags_that_exclude_each_other(tmp_path: Path) -> None:
    sizes = {"sequence_length": 8, "seed": 3}
    with pytest.raises(ConfigError, match="--data-path and --train-data-path exclude each other"):
        build_datasets(data_path=["a"], train_data_path=["b"], **sizes)
    with pytest.raises(ConfigError, match="--split 1,1,1 divides --data-path"):
        build_datasets(train_data_path=["b"], split="1,1,1", **sizes)
    with pytest.raises(ConfigError, match="--data-path PREFIX, --train-data-path PREFIX, or --mock-data"):
        build_datasets(**sizes)
    with pytest.raises(ConfigError, match="--eod-mask-loss needs a tokenizer"):
        build_datasets(data_path=["a"], eod_mask_loss=True, **sizes)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"absent\.bin and .*absent\.idx"):
        build_datasets(data_path=[str(tmp_path / "absent")], sequence_length=8, seed=3)


def test_tokenizer_is_checked_and_its_end_masked(tmp_path: Path) -> None:
    tokenizer = ByteLevelTokenizer()
    prefix = write(tmp_path / "a", [[*b"hello", 256]] * 10)
    header = DatasetHeader(
        tokenizer_type="ByteLevelTokenizer",
        fingerprint=tokenizer.fingerprint(),
        vocab_size=257,
        eod=256,
        append_eod=True,
        documents=10,
        tokens=60,
    )
    write_header(prefix, header)
    splits = build_datasets(
        data_path=[prefix], split="1", sequence_length=6, seed=3, tokenizer=tokenizer, eod_mask_loss=True
    )
    assert splits.train[0]["loss_mask"].sum() == 5
    with pytest.raises(DataError, match="tokenizer of this run has 99"):
        build_datasets(data_path=[prefix], split="1", sequence_length=6, seed=3, tokenizer=NullTokenizer(99))
