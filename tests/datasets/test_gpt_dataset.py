"""Megatron's `GPTDataset`: its indices and its items."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron.core.datasets.gpt_dataset import (
    GPTDataset,
    GPTDatasetConfig,
    MockGPTDataset,
    MockGPTLowLevelDataset,
)
from megatron.core.datasets.megatron_dataset import pad_token_id
from megatron.core.datasets.utils import Split
from megatron_core.datasets import IndexedDataset
from megatron_core.errors import ConfigError, DataError
from tests.datasets.files import write
from tests.features.megatron_order import reference

EOD = 99
DOCUMENTS = [[1, 2, 3, EOD], [4, EOD], [5, 6, 7, 8, 9, EOD], [10, 11, EOD], [12, EOD]]


def config(**changes: Any) -> GPTDatasetConfig:
    """Settings for a prefix that the tests open themselves."""
    settings: dict[str, Any] = {
        "random_seed": 11,
        "sequence_length": 6,
        "blend": (["unused"], None),
        "split": "1",
        "tokenizer": SimpleNamespace(eod=EOD, vocab_size=100),
        "reset_position_ids": False,
        "reset_attention_mask": False,
        "eod_mask_loss": False,
    }
    return GPTDatasetConfig(**{**settings, **changes})


def dataset(folder: Path, num_samples: int | None = None, split: Split = Split.train, **changes: Any) -> GPTDataset:
    """A data set over all documents."""
    prefix = str(folder / "a")
    if not IndexedDataset.exists(prefix):
        write(folder / "a", DOCUMENTS)
    indexed = IndexedDataset(prefix)
    return GPTDataset(indexed, prefix, np.arange(5, dtype=np.int32), num_samples, split, config(**changes))


@pytest.mark.parametrize("num_samples", [None, 3, 9, 40])
@pytest.mark.parametrize("extra", [True, False])
def test_indices_and_tokens_are_megatrons(num_samples: int | None, extra: bool, tmp_path: Path) -> None:
    data = dataset(tmp_path, num_samples, add_extra_token_to_sequence=extra)
    lengths = [len(document) for document in DOCUMENTS]
    order, rows, shuffle, *_ = reference.indices(lengths, range(5), 6, num_samples, 11, int(extra))
    assert data.document_index.tolist() == order
    assert data.sample_index.tolist() == [list(row) for row in rows]
    assert data.shuffle_index.tolist() == shuffle
    stream = [token for number in order for token in DOCUMENTS[number]]
    assert len(data) == len(shuffle)
    for position, number in enumerate(shuffle):
        text = stream[number * 6 : number * 6 + 6 + extra]
        item = data[position]
        assert item["tokens"].tolist() == text[:6]
        assert item["labels"].tolist() == (text[1:] if extra else [*text[1:], 0])
        assert item["loss_mask"].tolist() == ([1.0] * 6 if extra else [1.0] * 5 + [0.0])
    assert data[-1]["tokens"].equal(data[len(data) - 1]["tokens"])


def test_what_an_item_is_made_of(tmp_path: Path) -> None:
    data = dataset(tmp_path)
    item = data[0]
    shapes = {name: (tuple(value.shape), value.dtype) for name, value in item.items()}
    ids = ((6,), torch.int64)
    assert shapes == {
        "tokens": ids,
        "labels": ids,
        "loss_mask": ((6,), torch.float32),
        "position_ids": ids,
        "attention_mask": ((1, 6, 6), torch.bool),
    }
    assert item["position_ids"].tolist() == list(range(6))
    # True is masked: a token attends to itself and preceding tokens.
    assert item["attention_mask"][0].equal(torch.ones(6, 6).triu(1).bool())
    padding = data[None]
    assert padding["tokens"].equal(item["tokens"])
    assert not padding["loss_mask"].any() and data[0]["loss_mask"].all()
    assert "attention_mask" not in dataset(tmp_path, create_attention_mask=False)[0]


@pytest.mark.parametrize("positions", [False, True])
@pytest.mark.parametrize("attention", [False, True])
def test_documents_of_a_sample_are_separated(positions: bool, attention: bool, tmp_path: Path) -> None:
    data = dataset(
        tmp_path, sequence_length=15, reset_position_ids=positions, reset_attention_mask=attention, eod_mask_loss=True
    )
    item = data[0]
    tokens = item["tokens"].tolist()
    assert tokens.count(EOD) > 2
    document, position = [], []  # the number of each token's document, and its position in it
    for token in [EOD, *tokens][:-1]:
        start = token == EOD
        document.append((document[-1] if document else 0) + start)
        position.append(0 if start else position[-1] + 1)
    assert item["position_ids"].tolist() == (position if positions else list(range(15)))
    for row in range(15):  # C45
        for column in range(15):
            other = attention and document[row] != document[column]
            assert bool(item["attention_mask"][0, row, column]) == (column > row or other)
    assert item["loss_mask"].tolist() == [float(token != EOD) for token in tokens]


def test_a_last_partial_sample_of_validation(tmp_path: Path) -> None:
    # 17 tokens: two samples of 6, and one of 4 tokens and their labels.
    assert len(dataset(tmp_path, split=Split.valid)) == 2
    kept = dataset(tmp_path, split=Split.valid, drop_last_partial_validation_sequence=False)
    assert len(kept) == 3
    item = kept[int(kept.shuffle_index.argmax())]
    assert item["loss_mask"].tolist() == [1, 1, 1, 1, 0, 0]
    assert item["tokens"][5:].tolist() == [0] and item["labels"][4:].tolist() == [0, 0]
    assert len(dataset(tmp_path, drop_last_partial_validation_sequence=False)) == 2


def test_padding_is_no_end_of_document() -> None:
    assert pad_token_id(SimpleNamespace(eod=2, pad=0), False) == 0
    assert pad_token_id(SimpleNamespace(eod=2, pad=2), False) == -1
    assert pad_token_id(SimpleNamespace(eod=2, pad=2), True) == 2
    assert pad_token_id(SimpleNamespace(eod=2, eos=3, pad=3), False) == -1
    special = {"eos_token": 5, "pad_token": 4}
    assert pad_token_id(SimpleNamespace(eod=4, pad=4, special_tokens_dict=special), False) == 4
    assert pad_token_id(SimpleNamespace(eod=2), False) == -1

    class Refusing:
        eod = 2

        @property
        def pad(self) -> int:
            raise NotImplementedError

    assert pad_token_id(Refusing(), False) == -1


def test_an_end_of_document_that_is_also_padding_counts(tmp_path: Path) -> None:
    data = dataset(tmp_path, tokenizer=SimpleNamespace(eod=EOD, pad=EOD))
    assert (data[0]["labels"] == EOD).any()
    assert data[0]["loss_mask"].all()


def test_indices_come_from_the_cache(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = dataset(tmp_path, 9, path_to_cache=str(cache))
    assert len(list(cache.iterdir())) == 4
    again = dataset(tmp_path, 9, path_to_cache=str(cache))
    assert isinstance(again.sample_index.base, np.memmap)
    assert np.array_equal(first.sample_index, again.sample_index)
    # Settings that Megatron-LM leaves out of its key.
    dataset(tmp_path, 9, path_to_cache=str(cache), add_extra_token_to_sequence=False)
    assert len(list(cache.iterdir())) == 8


def test_too_few_tokens(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="/a: the train split has 17 tokens in 5 sequences, but one sample needs 18"):
        dataset(tmp_path, sequence_length=17)


@pytest.mark.parametrize("name", ["tokenizer", "reset_position_ids", "reset_attention_mask", "eod_mask_loss"])
def test_settings_that_are_needed(name: str) -> None:
    with pytest.raises(ConfigError, match=f"GPTDatasetConfig needs {name}"):
        config(**{name: None})


@pytest.mark.parametrize("name", ["object_storage_cache_path", "hybrid_context_parallel", "inter_document_masking"])
def test_settings_that_are_not_supported(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}='yes' is not supported"):
        config(**{name: "yes"})


def test_settings_that_change_nothing(tmp_path: Path) -> None:
    plain = dataset(tmp_path, 9)
    other = dataset(tmp_path, 9, data_parallel_size=4, context_parallel_size=2, sequences_per_dataset={})
    assert np.array_equal(plain.sample_index, other.sample_index)
    assert plain[3]["tokens"].equal(other[3]["tokens"])
    assert replace(config(), random_seed=5).random_seed == 5


def test_made_up_documents() -> None:
    made = MockGPTLowLevelDataset(SimpleNamespace(eod=7, vocab_size=50))
    assert len(made) == MockGPTDataset.numel_low_level_dataset(made) == 100_000
    rng = np.random.default_rng(0)
    assert np.array_equal(made.sequence_lengths, rng.integers(1, 4096, size=100_000, dtype=np.int32))
    length = int(made.sequence_lengths[3])
    assert made[3].tolist() == [i % 50 for i in range(1, length)] + [7]
    assert made.get(3, 5, 10).tolist() == made[3][5:15].tolist()
    assert made.get(3, 5).tolist() == made[3][5:].tolist()
