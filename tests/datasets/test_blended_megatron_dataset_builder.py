"""Megatron's builder, its settings and its blends, called like users call them."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.blended_megatron_dataset_config import (
    BlendedMegatronDatasetConfig,
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.datasets.megatron_dataset import MegatronDataset
from megatron.core.datasets.utils import Split
from megatron_core.errors import ConfigError, DataError
from tests.datasets.files import write_counting
from tests.features.megatron_order import reference

COUNTS = [100, 200, 300]


class Numbers(MegatronDataset):
    """A user's data set over an array of numbers: its own order, whole or repeated."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        size = len(self.indices) if self.num_samples is None else self.num_samples
        self.numbers = np.resize(self.indices, size)

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: np.ndarray) -> int:
        return len(low_level_dataset)

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: Any) -> np.ndarray:
        return np.load(dataset_path)

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, idx: int) -> dict[str, Any]:
        return {"text": self.dataset[self.numbers[idx]]}


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    """Files of 100, 200 and 300 numbers."""
    for number, count in enumerate(COUNTS):
        np.save(tmp_path / f"{number}.npy", np.arange(count) + 1000 * number)
    return [str(tmp_path / f"{number}.npy") for number in range(3)]


def build(sizes: list[int | None], **settings: Any) -> list[Any]:
    """The splits of a user's data set."""
    config = BlendedMegatronDatasetConfig(random_seed=1, sequence_length=1, **settings)
    return BlendedMegatronDatasetBuilder(Numbers, sizes, lambda: True, config).build()


def test_one_file_is_divided(paths: list[str]) -> None:
    train, valid, test = build([None, 7, None], blend=([paths[1]], None), split="60,40,0")
    assert (type(train), len(train), len(valid), test) == (Numbers, 120, 7, None)
    assert (train.index_split, valid.index_split) == (Split.train, Split.valid)
    assert (train[119]["text"], valid[0]["text"]) == (1119, 1120)


def test_weights(paths: list[str]) -> None:
    train, valid, test = build([1000, 10, 5], blend=(paths, [1, 2, 7]), split="80,15,5")
    chosen, numbers = reference.blend([0.1, 0.2, 0.7], 1000)
    assert train.dataset_index.tolist() == chosen and train.dataset_sample_index.tolist() == numbers
    assert [len(dataset) for dataset in train.datasets] == [101, 201, 704]
    assert train[3] == {"dataset_id": chosen[3], **train.datasets[chosen[3]][numbers[3]]}
    # ceil(5 w) = 1, 1, 4: the blend is slightly longer than requested.
    assert (len(train), len(valid), len(test)) == (1000, 10, 6)


def test_sizes_for_weights(paths: list[str]) -> None:
    train, valid, test = build([None, 1000, 20], blend=(paths, None), split="50,25,25")
    assert train.weights == [50, 100, 150]
    assert np.bincount(train.dataset_index).tolist() == [50, 100, 150]
    expected = reference.exhaustive_blend(train.weights)
    assert (train.dataset_index.tolist(), train.dataset_sample_index.tolist()) == expected
    assert (len(valid), len(test)) == (150, 20)
    assert valid.weights == pytest.approx([1 / 6, 2 / 6, 3 / 6])


def test_a_size_of_nothing(paths: list[str]) -> None:
    train, valid, test = build([100, 0, None], blend=(paths, None), split="50,50,0")
    assert (len(train), len(valid), test) == (100, 0, None)
    assert sum(map(len, valid.datasets)) == 300


def test_a_blend_for_each_split(paths: list[str]) -> None:
    blends = [(paths[:2], [1.0, 3.0]), ([paths[2]], [5.0]), None]
    train, valid, test = build([80, None, None], blend_per_split=[blends[0], (blends[1][0], None), None])
    assert (len(train), type(train), len(valid), type(valid), test) == (80, BlendedDataset, 300, Numbers, None)
    assert np.bincount(train.dataset_index).tolist() == [20, 60]
    # A single file is read completely, for any weight.
    _, valid, _ = build([80, 12, None], blend_per_split=blends)
    assert (type(valid), len(valid)) == (Numbers, 12)


def test_several_validation_sets(paths: list[str]) -> None:
    blends = [([paths[0]], None), (paths, None), None]
    apart = build([10, None, None], blend_per_split=blends, multiple_validation_sets=True, full_validation=True)[1]
    assert [len(dataset) for dataset in apart] == COUNTS
    with pytest.raises(ConfigError, match="full_validation"):
        build([10, 5, None], blend_per_split=blends, multiple_validation_sets=True, full_validation=True)


def test_weights_need_a_size(paths: list[str]) -> None:
    with pytest.raises(ConfigError, match="the train data has weights but no size"):
        build([None, None, None], blend_per_split=[(paths, [1, 1, 1]), None, None])
    with pytest.raises(ConfigError, match="the valid data has weights but no size"):
        build([5, None, 5], blend=(paths, [1, 1, 1]), split="1,1,1")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"blend": (["a"], None)}, "blend needs split"),
        ({"blend": (["a"], [1.0, 2.0]), "split": "1"}, "blend has 1 prefixes and 2 weights"),
        ({"blend": (["a"], None), "blend_per_split": [(["a"], None), None, None]}, "leave blend and split out"),
        ({"split": "1", "blend_per_split": [(["a"], None), None, None]}, "leave blend and split out"),
        ({"blend_per_split": [(["a"], None)]}, "has 1 entries; give 3"),
        ({"blend_per_split": [None, (["a"], []), None]}, r"blend_per_split\[1\] has 1 prefixes and 0 weights"),
    ],
)
def test_settings_that_exclude_each_other(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        BlendedMegatronDatasetConfig(random_seed=1, sequence_length=1, **settings)


def test_split_shares() -> None:
    assert parse_and_normalize_split("99,1,0") == [0.99, 0.01, 0.0]
    assert parse_and_normalize_split(" 3, 1") == [0.75, 0.25, 0.0]
    assert convert_split_vector_to_split_matrix([0.99, 0.01, 0.0]) == [(0, 0.99), (0.99, 1.0), None]
    both = convert_split_vector_to_split_matrix([0.99, 0.01, 0.0], [0.98, 0.02, 0.0])
    assert both == [(0, 0.98), (0.99, 1.0), None]
    config = BlendedMegatronDatasetConfig(random_seed=1, sequence_length=1)
    assert config.mock and config.split == "1,1,1"
    assert config.split_matrix == [(0, 1 / 3), (1 / 3, 2 / 3), (2 / 3, 1.0)]


def test_a_blend_by_hand(paths: list[str]) -> None:
    config = BlendedMegatronDatasetConfig(random_seed=1, sequence_length=1)

    def numbers(size: int) -> Numbers:
        return Numbers(np.arange(10), "path/to/x", np.arange(10), size, Split.valid, config)

    blend = BlendedDataset([numbers(4), numbers(9)], [2.0, 4.0], 11, config)
    assert (len(blend), blend.split, blend.size, blend.weights) == (11, Split.valid, 11, [1 / 3, 2 / 3])
    with pytest.raises(DataError, match=r"path/to/x: the blend draws \d+ samples .* number 1, which has only 2"):
        BlendedDataset([numbers(4), numbers(2)], [1.0, 2.0], 10, config)
    with pytest.raises(ConfigError, match="give a weight above 0 for each"):
        BlendedDataset([numbers(4), numbers(9)], [1.0, 0.0], 10, config)
    with pytest.raises(ConfigError, match="must be integers"):
        BlendedDataset([numbers(4), numbers(9)], [1.5, 2.0], None, config)


def test_ranks_that_need_no_data(paths: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    config = BlendedMegatronDatasetConfig(random_seed=1, sequence_length=1, blend=(paths, None), split="1")
    builder = BlendedMegatronDatasetBuilder(Numbers, [None] * 3, lambda: False, config)
    assert builder.build()[0] is not None
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert builder.build() == [None, None, None]


@pytest.mark.parametrize("threads", [1, 3])
def test_token_files(threads: int, tmp_path: Path) -> None:
    prefixes = [write_counting(tmp_path / str(n), [30 + 7 * n] * 10, 1000 * n) for n in range(3)]
    config = GPTDatasetConfig(
        random_seed=1234,
        sequence_length=5,
        blend=(prefixes, [3.0, 1.0, 1.0]),
        split="70,20,10",
        tokenizer=SimpleNamespace(eod=0),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        path_to_cache=str(tmp_path / "cache"),
        num_dataset_builder_threads=threads,
    )
    train, valid, test = BlendedMegatronDatasetBuilder(GPTDataset, [100, 10, 10], lambda: True, config).build()
    assert (len(train), len(valid), len(test)) == (100, 10, 10)
    for number, asked in enumerate([61, 21, 21]):
        expected = reference.indices([30 + 7 * number] * 10, range(7), 5, asked, 1234)
        assert train.datasets[number].document_index.tolist() == expected[0]
        assert train.datasets[number].shuffle_index.tolist() == expected[2]
        assert set(valid.datasets[number].document_index.tolist()) == {7, 8}
    again = BlendedMegatronDatasetBuilder(GPTDataset, [100, 10, 10], lambda: True, config).build()[0]
    assert all(again[i]["tokens"].equal(train[i]["tokens"]) for i in range(100))
    batch = next(iter(torch.utils.data.DataLoader(train, batch_size=4)))
    assert batch["tokens"].shape == (4, 5) and batch["dataset_id"].tolist() == train.dataset_index[:4].tolist()


def mock_config(**changes: Any) -> GPTDatasetConfig:
    """Settings without a blend."""
    return GPTDatasetConfig(
        random_seed=1234,
        sequence_length=1024,
        split="990,9,1",
        reset_position_ids=True,
        reset_attention_mask=True,
        eod_mask_loss=True,
        tokenizer=SimpleNamespace(eod=8191, vocab_size=8192),
        **changes,
    )


def test_made_up_data() -> None:
    datasets = BlendedMegatronDatasetBuilder(MockGPTDataset, [100, 100, 100], lambda: True, mock_config()).build()
    first = [dataset[0]["tokens"] for dataset in datasets]
    assert all(type(dataset) is MockGPTDataset and len(dataset) >= 100 for dataset in datasets)
    assert not any(a.equal(b) for a, b in [(first[0], first[1]), (first[0], first[2]), (first[1], first[2])])
    assert datasets[0][0]["tokens"].equal(first[0]) and not datasets[0][1]["tokens"].equal(first[0])


def test_made_up_data_to_the_last_token() -> None:
    config = mock_config(drop_last_partial_validation_sequence=False, add_extra_token_to_sequence=False)
    valid = BlendedMegatronDatasetBuilder(MockGPTDataset, [0, None, 0], lambda: True, config).build()[1]
    item = valid[int(valid.shuffle_index.argmax())]
    last = int(torch.nonzero(item["labels"] == 8191).max())
    assert last < 1023
    assert item["tokens"][last] != 8191
    assert not item["labels"][last + 1 :].any() and not item["loss_mask"][last + 1 :].any()
    assert not valid[None]["loss_mask"].any()


def test_the_package_itself_starts_without_torch() -> None:
    code = "import sys, megatron_core.features.megatron_order; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
