"""The samples of the keyed order are those of the definition: epochs, splits, blends, phases and masks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_core.datasets import Splits
from megatron_core.datasets.base import Dataset
from tests.datasets.files import splits_of, write
from tests.plain.data import Piece, blend_problem, epochs_problem, pieces, read_sequences, share_of

LENGTH = 8
EOD = 999


def file(folder: Path, name: str, start: int, count: int = 40) -> str:
    """A file whose documents have tokens from ``start`` on, each different, and end with EOD."""
    token, documents = start, []
    for number in range(count):
        size = 3 + (7 * number) % 11
        documents.append([*range(token, token + size), EOD])
        token += size
    return write(folder / name, documents)


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str, str]:
    names = ("a", 1000, 40), ("b", 5000, 60), ("c", 9000, 30)
    a, b, c = (file(tmp_path, name, start, count) for name, start, count in names)
    return a, b, c


def built(**settings: Any) -> Splits:
    common = {"seq_length": LENGTH, "vocab_size": 20000, "mock_data": False}
    return splits_of(**common | settings)


def first(dataset: Dataset | None, count: int) -> list[Piece]:
    assert dataset is not None
    samples = [dataset[i] for i in range(count)]
    return [(tuple(sample["tokens"].tolist()), tuple(sample["labels"].tolist())) for sample in samples]


def source_of(piece: Piece) -> int:
    """The file of a sample, by its tokens."""
    token = next(token for token in piece[0] if token != EOD)
    return (token - 1000) // 4000


def test_each_split_has_epochs_of_its_share(files: tuple[str, str, str]) -> None:
    a, _, _ = files
    splits = built(data_path=(a,), split="70,20,10")
    for number, dataset in enumerate((splits.train, splits.valid, splits.test)):
        expected = pieces(share_of(read_sequences(a), (70, 20, 10), number), LENGTH)
        assert epochs_problem(first(dataset, 3 * len(expected)), expected) == ""


def test_default_split_is_969_30_1(tmp_path: Path) -> None:
    path = file(tmp_path, "long", 1000, 1000)
    splits = built(data_path=(path,))
    for number, dataset in enumerate((splits.train, splits.valid)):
        expected = pieces(share_of(read_sequences(path), (969, 30, 1), number), LENGTH)
        assert epochs_problem(first(dataset, len(expected)), expected) == ""


@pytest.mark.parametrize("weights", [(0.5, 0.3, 0.2), (7.0, 1.0, 2.0), None])
def test_blend(weights: tuple[float, ...] | None, files: tuple[str, str, str], tmp_path: Path) -> None:
    """In the flags, and in a file of flags."""
    texts = files if weights is None else tuple(x for pair in zip(map(str, weights), files, strict=True) for x in pair)
    (tmp_path / "arguments.txt").write_text(" ".join(texts))
    every = [pieces(read_sequences(path), LENGTH) for path in files]
    for settings in ({"data_path": texts}, {"data_args_path": str(tmp_path / "arguments.txt")}):
        samples = first(built(split="1,0,0", **settings).train, 400)
        sources = [source_of(sample) for sample in samples]
        assert blend_problem(sources, [len(part) for part in every] if weights is None else weights) == ""
        for number, expected in enumerate(every):
            mine = [sample for sample, source in zip(samples, sources, strict=True) if source == number]
            assert epochs_problem(mine, expected) == ""


def test_paths_of_each_split(files: tuple[str, str, str], tmp_path: Path) -> None:
    """In the flags, and in a file of flags."""
    paths = dict(zip(("train", "valid", "test"), files, strict=True))
    (tmp_path / "paths.json").write_text(json.dumps({name: [path] for name, path in paths.items()}))
    train, valid, test = files
    flags = {"train_data_path": (train,), "valid_data_path": (valid,), "test_data_path": (test,)}
    for settings in (flags, {"per_split_data_args_path": str(tmp_path / "paths.json")}):
        splits = built(**settings)
        for dataset, path in zip((splits.train, splits.valid, splits.test), files, strict=True):
            expected = pieces(read_sequences(path), LENGTH)
            assert epochs_problem(first(dataset, 2 * len(expected)), expected) == ""


def test_several_validation_sets_read_as_a_whole(files: tuple[str, str, str]) -> None:
    a, b, c = files
    splits = built(
        train_data_path=(a,),
        valid_data_path=(b, c),
        multiple_validation_sets=True,
        validation_set_names=("second", "third"),
        full_validation=True,
    )
    for (name, dataset), path in zip(splits.of("validation").items(), (b, c), strict=True):
        expected = pieces(read_sequences(path), LENGTH)
        assert name == f"validation {'second' if path == b else 'third'}"
        assert len(dataset) == len(expected)
        assert sorted(first(dataset, len(expected))) == sorted(expected)


def test_phases_repeat_nothing_before_a_file_is_read(files: tuple[str, str, str], tmp_path: Path) -> None:
    a, b, _ = files
    (tmp_path / "phases.yaml").write_text(
        f"- {{samples: 20, data_path: [0.5, {a}, 0.5, {b}]}}\n- {{data_path: [0.2, {a}, 0.8, {b}]}}\n"
    )
    samples = first(built(data_phases=str(tmp_path / "phases.yaml"), split="1,0,0").train, 120)
    sources = [source_of(sample) for sample in samples]
    assert blend_problem(sources[:20], (0.5, 0.5)) == blend_problem(sources[20:], (0.2, 0.8)) == ""
    for number, path in enumerate((a, b)):
        mine = [sample for sample, source in zip(samples, sources, strict=True) if source == number]
        assert epochs_problem(mine, pieces(read_sequences(path), LENGTH)) == ""


def test_cyclic_repeats_one_epoch_in_other_orders(files: tuple[str, str, str]) -> None:
    a, _, _ = files
    expected = pieces(read_sequences(a), LENGTH)
    samples = first(built(data_path=(a,), split="1,0,0", dataloader_type="cyclic").train, 3 * len(expected))
    assert epochs_problem(samples, expected) == ""


def test_seed_changes_the_order(files: tuple[str, str, str]) -> None:
    one, two = (first(built(data_path=files, split="1,0,0", seed=seed).train, 40) for seed in (1, 2))
    assert one != two


def test_masks_of_ends_of_documents(tmp_path: Path) -> None:
    path = file(tmp_path, "short", 0, 40)
    settings = {"data_path": (path,), "split": "1,0,0", "vocab_size": EOD + 1, "tokenizer_type": "NullTokenizer"}
    for masked in (True, False):
        dataset = built(**settings, eod_mask_loss=masked).train
        assert dataset is not None
        for sample in (dataset[i] for i in range(40)):
            expected = [0.0 if masked and token == EOD else 1.0 for token in sample["tokens"].tolist()]
            assert sample["loss_mask"].tolist() == expected
