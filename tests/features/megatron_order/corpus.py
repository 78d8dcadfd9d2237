"""Token files, and flags that read them in Megatron's order in several ways."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np

from tests.datasets.files import write

VOCABULARY, LENGTH, SEED = 64, 16, 1234
FLAGS: dict[str, dict[str, Any]] = {
    "one file, epochs": {"data_path": ["/1"], "split": "95,5,0"},
    "weights": {"data_path": ["0.3", "/0", "0.5", "/1", "0.2", "/2"], "split": "8,1,1"},
    "by size": {"data_path": ["/0", "/1", "/2"], "split": "90,10,0"},
    "own files": {"train_data_path": ["0.9", "/0", "0.4", "/2"], "valid_data_path": ["/1"]},
}
"""Settings of the data; ``/N`` is file N."""


def write_files(folder: Path) -> None:
    """Write three files of documents that end with the last token of the vocabulary."""
    end = VOCABULARY - 1
    for number, (documents, dtype) in enumerate([(60, np.int32), (15, np.uint16), (40, np.uint16)]):
        draw = random.Random(number)
        lengths = [draw.choice([0, 3, 8, 20, 40]) for _ in range(documents)]
        texts = [[draw.randrange(end) // (number + 1) for _ in range(length)] + [end] for length in lengths]
        write(folder / str(number), texts, dtype)


def settings_in(folder: Path, name: str) -> dict[str, Any]:
    """The settings ``FLAGS[name]`` with the files in ``folder``."""
    flags = FLAGS[name]
    paths = {flag: flags[flag] for flag in flags if flag.endswith("_path")}
    placed = {
        flag: tuple(f"{folder}{path}" if path.startswith("/") else path for path in given)
        for flag, given in paths.items()
    }
    return flags | placed


def samples_of_megatron(settings: dict[str, Any], sizes: tuple[int, int, int]) -> tuple[Any, Any, Any]:
    """Megatron Core's own data sets of training, validation and test, with at least ``sizes`` samples.

    Call it after ``import_megatron``.
    """
    from argparse import Namespace

    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.utils import get_blend_from_list

    blends = {flag: get_blend_from_list(list(given)) for flag, given in settings.items() if flag != "split"}
    if "data_path" in blends:
        given = {"blend": blends["data_path"], "split": settings["split"]}
    else:
        given = {"blend_per_split": [blends.get(f"{name}_data_path") for name in ("train", "valid", "test")]}
    switches = dict.fromkeys(("reset_position_ids", "reset_attention_mask", "eod_mask_loss"), False)
    config = GPTDatasetConfig(
        random_seed=SEED,
        sequence_length=LENGTH,
        tokenizer=Namespace(vocab_size=VOCABULARY, eod=VOCABULARY - 1, pad=-1, unique_identifiers={}),
        create_attention_mask=False,
        **switches,
        **given,
    )
    train, valid, test = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()
    return train, valid, test
