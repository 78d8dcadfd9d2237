"""Samples on token files in Megatron's order against those that Megatron Core 0.19.2 read from the same files.

``megatron_0_19.json``: for each entry of ``corpus.FLAGS`` the lengths of its data sets of training and validation, and
tokens of samples, written by ``record`` in a process that can import Megatron Core.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_core.config import RunConfig
from megatron_core.training.data import make_splits
from tests.features.megatron_order.corpus import (
    FLAGS,
    LENGTH,
    SEED,
    VOCABULARY,
    samples_of_megatron,
    settings_in,
    write_files,
)

RECORDED = Path(__file__).parent / "megatron_0_19.json"
SIZES = (80, 8, 8)
"""Samples of training, validation and test: 20 iterations of 4, and one evaluation of 2."""
READ = {"train": (0, 12, 13, 14, 15, 40, 79), "valid": (0, 7)}
"""The recorded samples."""


def facts(splits: dict[str, Any]) -> dict[str, Any]:
    """Lengths, and tokens with the last label of some samples, of data sets by name."""
    found: dict[str, Any] = {}
    for name, numbers in READ.items():
        samples = [splits[name][number] for number in numbers]
        rows = [[*map(int, sample["tokens"]), int(sample["labels"][-1])] for sample in samples]
        found[name] = {"length": len(splits[name]), "samples": rows}
    return found


def record(folder: Path) -> None:
    """Write ``RECORDED`` with Megatron Core's data sets of files in ``folder``."""
    write_files(folder)
    found = {}
    for name in FLAGS:
        train, valid, _ = samples_of_megatron(settings_in(folder, name), SIZES)
        found[name] = facts({"train": train, "valid": valid})
    RECORDED.write_text(json.dumps(found).replace('"samples"', '\n  "samples"').replace(' "one', '\n "one') + "\n")


@pytest.mark.parametrize("name", FLAGS)
def test_samples_are_those_of_megatron(name: str, tmp_path: Path) -> None:
    write_files(tmp_path)
    data = {"data_order": "megatron", "seq_length": LENGTH, "vocab_size": VOCABULARY}
    training = {"seed": SEED, "global_batch_size": 4, "train_iters": 20, "eval_iters": 2}
    config = RunConfig.from_flat(data | training | settings_in(tmp_path, name))
    splits = make_splits(config, 1, None, VOCABULARY)
    expected = json.loads(RECORDED.read_text())[name]
    assert facts({"train": splits.train, "valid": splits.valid}) == expected


def test_too_few_samples_are_named_at_the_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without weights Megatron Core reads each file once, and stops at the end (``BlendedDataset`` by size)."""
    write_files(tmp_path)
    data = {"data_order": "megatron", "seq_length": LENGTH, "vocab_size": VOCABULARY}
    training = {"global_batch_size": 4, "train_iters": 100, "eval_iters": 3}
    config = RunConfig.from_flat(data | training | settings_in(tmp_path, "by size"))
    splits: Any = make_splits(config, 1, None, VOCABULARY)
    notes = capsys.readouterr().out.splitlines()
    assert [note.split("once:")[1] for note in notes] == [
        f" the run stops with an error after {len(split)}; give weights" for split in (splits.train, splits.valid)
    ]
