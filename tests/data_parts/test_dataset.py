"""A list of parts is read as the joined pair: samples, order, splits, resumes, and its errors."""

import json
import os
import time
import tracemalloc
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from megatron_core.commands.merge_datasets import MergeFlags, merge_datasets
from megatron_core.config import DataConfig
from megatron_core.data_parts.dataset import PartsDataset
from megatron_core.data_parts.manifest import FORMAT, PartEntry, PartList, read_parts
from megatron_core.datasets import build_datasets, get_bin_path, get_idx_path
from megatron_core.datasets.indexed import HEADER, MAGIC, VERSION, DType
from megatron_core.datasets.sources import describe_changes, record_sources
from megatron_core.errors import DataError
from megatron_core.preprocess.builder import IndexedDatasetBuilder
from tests.sample import WHOLE_MATRIX


def write_pair(prefix: Path, documents: list[list[int]]) -> PartEntry:
    """A pair with one sequence for each document."""
    prefix.parent.mkdir(exist_ok=True)
    with IndexedDatasetBuilder(get_bin_path(str(prefix)), np.uint16) as builder:
        for document in documents:
            builder.add_document(document, [len(document)])
        builder.finalize(get_idx_path(str(prefix)))
    return PartEntry(f"{prefix.parent.name}/{prefix.name}", len(documents), len(documents), sum(map(len, documents)))


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """`whole`, and `listed` of seven parts with the same documents; a part has no document, another no token."""
    random = np.random.default_rng(1)
    documents = [random.integers(0, 500, size=int(random.integers(1, 60))).tolist() for _ in range(300)]
    write_pair(tmp_path / "files" / "whole", documents)
    borders = [0, 40, 40, 41, 150, 151, 280, 300]
    entries = [
        write_pair(tmp_path / "files" / f"part{n}", documents[low:high])
        for n, (low, high) in enumerate(pairwise(borders))
    ]
    (tmp_path / "listed.parts.json").write_bytes(PartList("uint16", tuple(entries)).encoded())
    return tmp_path


def data(prefix: Path, **changes: object) -> DataConfig:
    """Settings for one token file."""
    return DataConfig(**{"data_path": (str(prefix),), "seq_length": 32, "split": "80,15,5", **changes})


def test_samples_are_those_of_the_joined_pair_in_every_split_and_epoch(corpus: Path) -> None:
    whole = build_datasets(data(corpus / "files" / "whole"), seed=3)
    listed = build_datasets(data(corpus / "listed"), seed=3)
    for name in ("train", "valid", "test"):
        expected, samples = getattr(whole, name), getattr(listed, name)
        assert samples.samples_per_epoch == expected.samples_per_epoch
        for index in range(2 * expected.samples_per_epoch):
            assert np.array_equal(samples[index]["tokens"], expected[index]["tokens"])
            assert np.array_equal(samples[index]["labels"], expected[index]["labels"])


def test_blends_with_lists_have_the_order_of_blends_with_pairs(corpus: Path) -> None:
    whole, listed = str(corpus / "files" / "whole"), str(corpus / "listed")
    other = str(corpus / "files" / "part3")
    expected = build_datasets(data(corpus, data_path=("0.7", whole, "0.3", other), split="1"), seed=3).train
    blend = build_datasets(data(corpus, data_path=("0.7", listed, "0.3", other), split="1"), seed=3).train
    for index in range(200):
        assert np.array_equal(blend[index]["tokens"], expected[index]["tokens"])


def test_the_merge_command_lists_pairs_and_joins_a_list(corpus: Path, capfd: pytest.CaptureFixture) -> None:
    flags = MergeFlags(input=(str(corpus / "listed"),), output_prefix=str(corpus / "joined"))
    merge_datasets(flags)
    for suffix in (".bin", ".idx"):
        assert (corpus / f"joined{suffix}").read_bytes() == (corpus / "files" / f"whole{suffix}").read_bytes()
    parts = tuple(str(corpus / "files" / f"part{number}") for number in range(7))
    merge_datasets(MergeFlags(input=parts, output_prefix=str(corpus / "again"), keep_parts=True))
    assert (corpus / "again.parts.json").read_bytes() == (corpus / "listed.parts.json").read_bytes()
    assert "300 documents" in capfd.readouterr().out
    with pytest.raises(DataError, match=r"part0 is not in .*elsewhere"):
        merge_datasets(MergeFlags(input=parts, output_prefix=str(corpus / "elsewhere" / "a"), keep_parts=True))


def test_megatrons_order_needs_the_joined_pair(corpus: Path) -> None:
    from megatron_core.config import RunConfig, TrainingConfig
    from megatron_core.features.megatron_order.part import OrderedData
    from megatron_core.training.data import DataRequest

    config = RunConfig(data=data(corpus / "listed", data_order="megatron"), training=TrainingConfig(train_iters=1))
    with pytest.raises(DataError, match=r"listed is a list of parts.*join the parts with megatron-merge-datasets"):
        OrderedData().build(DataRequest(config, None, 500, 1))


def test_a_changed_part_is_noticed_when_a_run_resumes(corpus: Path) -> None:
    before = record_sources(data(corpus / "listed"))
    assert not describe_changes(before, record_sources(data(corpus / "listed")), 7)
    path = corpus / "files" / "part3.bin"
    path.write_bytes(path.read_bytes()[::-1])
    assert "listed has different tokens" in describe_changes(before, record_sources(data(corpus / "listed")), 7)[0]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / "part5.bin").unlink(), r"part5, a part of .*listed.*No such file"),
        (lambda folder: os.truncate(folder / "part5.bin", 100), r"part5.bin has 100 bytes, but the list of parts"),
        (lambda folder: os.truncate(folder / "part0.idx", 100), r"part0.idx has 100 bytes, but the list of parts"),
        (
            lambda folder: (folder / "part0.idx").write_bytes(
                (folder / "part0.idx").read_bytes().replace(b"\x01\0\0\0\0\0\0\0\x08", b"\x01\0\0\0\0\0\0\0\x04")
            ),
            r"part0.idx has other counts or another dtype",
        ),
        (lambda folder: (folder.parent / "listed.idx").touch(), r"listed: there is a list of parts .* and also a pair"),
    ],
)
def test_damaged_parts_are_errors_when_the_data_is_opened(damage: object, words: str, corpus: Path) -> None:
    damage(corpus / "files")
    with pytest.raises(DataError, match=words):
        build_datasets(data(corpus / "listed"), seed=3)


def test_a_part_that_is_truncated_during_the_run_is_an_error(corpus: Path) -> None:
    listed = PartsDataset(str(corpus / "listed"))
    os.truncate(corpus / "files" / "part5.bin", 100)
    with pytest.raises(DataError, match=r"part5.bin ended at byte 100 after it was opened"):
        listed.tokens(0, listed.num_tokens)


@pytest.mark.parametrize(
    "row",
    [
        ["../part", 1, 1, 1],
        ["/etc/part", 1, 1, 1],
        ["a/../../part", 1, 1, 1],
        ["s3://bucket/part", 1, 1, 1],
        ["part", 1, 1],
        ["part", -1, 1, 1],
        ["part", 1, True, 1],
        [7, 1, 1, 1],
        "part",
        None,
    ],
)
def test_a_list_of_another_program_is_refused(row: object, tmp_path: Path) -> None:
    content = {"format": FORMAT, "dtype": "uint16", "parts": [row]}
    (tmp_path / "a.parts.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"a.parts.json is not a list of parts of a token file"):
        read_parts(str(tmp_path / "a"))


PARTS, DOCUMENTS, TOKENS = 10_000 if WHOLE_MATRIX else 1000, 10**6, 500
"""With WHOLE_MATRIX=1, 10^10 documents of 500 tokens of 2 bytes: 10 TB of tokens, and 200 GB of index."""


def test_terabytes_open_in_seconds_and_little_memory(tmp_path: Path) -> None:
    # All parts share one index on the disk, and the token files are sparse.
    index = tmp_path / "index"
    with index.open("wb") as file:
        file.write(HEADER.pack(MAGIC, VERSION, DType.uint16, DOCUMENTS, DOCUMENTS + 1))
        np.full(DOCUMENTS, TOKENS, np.int32).tofile(file)
        (np.arange(DOCUMENTS) * (2 * TOKENS)).tofile(file)
        np.arange(DOCUMENTS + 1).tofile(file)
    folder = tmp_path / "parts"
    folder.mkdir()
    for number in range(PARTS):
        os.link(index, folder / f"{number}.idx")
        with (folder / f"{number}.bin").open("wb") as file:
            file.truncate(2 * DOCUMENTS * TOKENS)
    entries = tuple(PartEntry(f"parts/{n}", DOCUMENTS, DOCUMENTS, DOCUMENTS * TOKENS) for n in range(PARTS))
    (tmp_path / "corpus.parts.json").write_bytes(PartList("uint16", entries).encoded())
    tracemalloc.start()
    started = time.monotonic()
    splits = build_datasets(data(tmp_path / "corpus", seq_length=4096, split=None), seed=1)
    for index in (0, 1, 10**9, 10**12):
        assert splits.train[index]["tokens"].shape == (4096,)
    seconds = time.monotonic() - started
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    documents = round(0.969 * PARTS * DOCUMENTS)
    assert splits.train.samples_per_epoch == (documents * TOKENS - 1) // 4096
    assert splits.valid.num_tokens == round(0.03 * PARTS * DOCUMENTS) * TOKENS
    print(f"opened in {seconds:.2f} s with {peak / 1e6:.1f} MB")
    assert seconds < 30
    assert peak < 30e6
