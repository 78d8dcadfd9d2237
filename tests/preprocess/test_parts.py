"""Runs in parts give the bytes of one machine: partitions of any number, joined or kept."""

import gzip
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from megatron_core.data_parts.dataset import PartsDataset
from megatron_core.datasets.indexed import IndexedDataset
from megatron_core.errors import ConfigError, DataError
from megatron_core.preprocess import PreprocessSettings, preprocess
from megatron_core.preprocess.identity import token_identity
from megatron_core.preprocess.inputs import DamagedFileError, describe_input
from megatron_core.preprocess.output import TokenOutput
from megatron_core.preprocess.plan import divide_file, divide_range, plan_parts
from megatron_core.preprocess.worker import InputRange
from tests.preprocess.corpora import SMALL, outcome, settings, texts, write_jsonl, write_packed


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts so small that a corpus of some kilobytes has many."""
    monkeypatch.setattr(PreprocessSettings, "part_bytes", property(lambda self: 2000))


def corpus(folder: Path) -> None:
    """Files of every format, with broken and empty documents; some files are divided, others share a part."""
    lines = [json.dumps({"text": text, "other": "z" * n}) if n % 9 else "{" for n, text in enumerate(texts(150))]
    write_packed(folder / "a.jsonl", "\n".join(lines).encode())
    write_packed(folder / "b.jsonl.gz", "\n".join(lines[:40]).encode())
    (folder / "c.jsonl").write_text("")
    for number in range(4):
        write_jsonl(folder / f"d{number}.jsonl", texts(3 + number))
    table = pyarrow.table({"text": texts(50), "other": texts(50)})
    pyarrow.parquet.write_table(table, folder / "e.parquet", row_group_size=10)
    (folder / "e.parquet.gz").write_bytes(gzip.compress((folder / "e.parquet").read_bytes()))
    (folder / "f.txt").write_text("one document")
    write_packed(folder / "g.jsonl", "\n".join(lines[::-1]).encode())


def in_partitions(folder: Path, total: int, **changes: object) -> dict[str, bytes]:
    """The outcome of N partitions, written in reverse order, and their join."""
    for number in range(total, 0, -1):
        preprocess(settings(folder, partition=f"{number}/{total}", **changes), SMALL)
    return outcome(folder, join_partitions=True, **changes)


@pytest.mark.parametrize("total", [1, 7])
def test_partitions_give_the_bytes_of_one_run(total: int, tmp_path: Path) -> None:
    corpus(tmp_path)
    changes = {"input": (f"{tmp_path}/[a-g]*",), "append_eod": True, "document_separator": "y"}
    expected = outcome(tmp_path, **changes)
    assert b"a.jsonl, line 145 is not JSON" in expected["_problems.txt"]
    assert in_partitions(tmp_path, total, **changes) == expected
    assert not (tmp_path / "out.parts").exists()


def test_two_keys_and_a_file_that_is_given_twice(tmp_path: Path) -> None:
    corpus(tmp_path)
    names = [str(tmp_path / name) for name in ("a.jsonl", "e.parquet", "a.jsonl")]
    changes = {"input": tuple(names), "json_keys": ("text", "other")}
    expected = outcome(tmp_path, **changes)
    assert in_partitions(tmp_path, 2, **changes) == expected


def test_a_damaged_file_is_left_out_with_all_its_parts(tmp_path: Path) -> None:
    corpus(tmp_path)
    (tmp_path / "a.jsonl").write_text(json.dumps([{"text": text} for text in texts(200)], indent=1))
    packed = (tmp_path / "b.jsonl.gz").read_bytes()
    (tmp_path / "b.jsonl.gz").write_bytes(packed[:-20])
    changes = {"input": (f"{tmp_path}/[a-g]*",), "skip_damaged_files": True}
    expected = outcome(tmp_path, **changes)
    assert expected["_problems.txt"].count(b"damaged: ") == 2
    assert in_partitions(tmp_path, 2, **changes) == expected
    for number in (1, 2):
        preprocess(settings(tmp_path, partition=f"{number}/2", **changes), SMALL)
    kept = outcome(tmp_path, join_partitions=True, keep_parts=True, **changes)
    assert kept["_problems.txt"] == expected["_problems.txt"]
    listed = PartsDataset(str(tmp_path / "out_text_document"))
    assert listed.tokens(0, listed.num_tokens).tobytes() == expected["_text_document.bin"]


def test_kept_parts_are_read_as_the_joined_file(tmp_path: Path) -> None:
    corpus(tmp_path)
    changes = {"input": (f"{tmp_path}/[a-g]*",), "append_eod": True}
    expected = outcome(tmp_path, output_prefix=str(tmp_path / "whole"), **changes)
    for number in (1, 2):
        preprocess(settings(tmp_path, partition=f"{number}/2", **changes), SMALL)
    kept = outcome(tmp_path, join_partitions=True, keep_parts=True, **changes)
    assert kept["_text_document.json"] == expected["_text_document.json"]
    assert kept["_problems.txt"] == expected["_problems.txt"]
    pair = IndexedDataset(str(tmp_path / "whole_text_document"))
    parts = PartsDataset(str(tmp_path / "out_text_document"))
    assert len(parts.parts) > 5
    assert (len(parts), parts.num_documents, parts.num_tokens) == (len(pair), pair.num_documents, pair.num_tokens)
    for sequence in range(len(pair)):
        assert parts.sequence_pointers[sequence] == pair.sequence_pointers[sequence]
        assert parts.sequence_lengths[sequence] == pair.sequence_lengths[sequence]
    for first in range(0, pair.num_tokens, 997):
        count = min(1500, pair.num_tokens - first)
        assert np.array_equal(parts.tokens(first, count), pair.tokens(first, count))
    with pytest.raises(ConfigError, match=r"out_text_document.parts.json already exists"):
        preprocess(settings(tmp_path, overwrite=False, **changes), SMALL)
    # A pair replaces the list.
    assert outcome(tmp_path, **changes)["_text_document.bin"] == expected["_text_document.bin"]
    assert not (tmp_path / "out_text_document.parts.json").exists()


def write_groups(path: Path, count: int, rows: int) -> list[str]:
    """A Parquet file with groups of some rows, and one that is ten times as long as the others; returns its texts."""
    documents = texts(count)
    schema = pyarrow.schema([("text", pyarrow.string())])
    with pyarrow.parquet.ParquetWriter(path, schema) as writer:
        first = 0
        while first < count:
            stop = first + rows * (10 if first == 4 * rows else 1)
            writer.write_table(pyarrow.table({"text": documents[first:stop]}, schema), row_group_size=stop - first)
            first = stop
    return documents


def test_row_groups_are_divided_over_workers_and_parts(tmp_path: Path) -> None:
    documents = write_groups(tmp_path / "a.parquet", 600, 20)
    write_jsonl(tmp_path / "a.jsonl", documents)
    source = describe_input(tmp_path / "a.parquet")
    given = settings(tmp_path, input=(f"{tmp_path}/a.parquet",))
    everything = InputRange(0, size=source.size)
    ranges = list(divide_file(everything, source, ("text",), 1000))
    assert len(ranges) > 10 and [r.end for r in ranges] == [*(r.start for r in ranges[1:]), None]
    assert all(r.start % 20 == 0 for r in ranges)
    for number, later in enumerate(ranges):  # a run that resumes there
        assert list(divide_file(InputRange(0, later.start), source, ("text",), 1000)) == ranges[number:]
        again = list(divide_file(InputRange(0, later.start + 3), source, ("text",), 1000))
        assert (again[0].start, again[0].end, again[1:]) == (later.start + 3, later.end, ranges[number + 1 :])
    limits = replace(SMALL, part_bytes=1500)
    pieces = list(divide_range(everything, source, given, limits, tmp_path, 1500))
    long = [piece for piece in pieces if piece.block is not None]  # only of the long group, from row 80 to 280
    assert {piece.start for piece in long} == {80} and {piece.end for piece in pieces} >= {280, 300, None}
    assert len(long) > 10 and len(pieces) - len(long) > 10
    assert len(plan_parts([source], token_identity(given, ""), 2000, (0, 0))) > 5
    expected = outcome(tmp_path, input=(f"{tmp_path}/a.jsonl",))
    for workers in (1, 2):
        divided = outcome(tmp_path, input=given.input, workers=workers)
        assert divided["_text_document.bin"] == expected["_text_document.bin"]
        assert divided["_text_document.idx"] == expected["_text_document.idx"]
    assert in_partitions(tmp_path, 3, input=given.input) == divided


def test_row_groups_of_a_damaged_file(tmp_path: Path) -> None:
    """Workers, and parts, that find the same damage leave out the whole file once."""
    write_groups(tmp_path / "a.parquet", 600, 20)
    write_groups(tmp_path / "b.parquet", 300, 20)
    data = bytearray((tmp_path / "a.parquet").read_bytes())
    about = pyarrow.parquet.read_metadata(tmp_path / "a.parquet").row_group(15).column(0)
    data[about.dictionary_page_offset or about.data_page_offset] ^= 0xFF
    (tmp_path / "a.parquet").write_bytes(data)
    names = {"input": (f"{tmp_path}/a.parquet", f"{tmp_path}/b.parquet")}
    with pytest.raises(DamagedFileError, match=r"a.parquet is damaged in row group 15, after row"):
        preprocess(settings(tmp_path, **names), SMALL)
    expected = outcome(tmp_path, skip_damaged_files=True, **names)
    assert expected["_problems.txt"].count(b"damaged: ") == 1
    alone = outcome(tmp_path, output_prefix=str(tmp_path / "alone"), input=names["input"][1:])
    assert expected["_text_document.bin"] == alone["_text_document.bin"]
    assert in_partitions(tmp_path, 3, skip_damaged_files=True, **names) == expected


def test_finished_parts_are_not_written_again(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    corpus(tmp_path)
    changes = {"input": (f"{tmp_path}/[a-g]*",)}
    preprocess(settings(tmp_path, partition="1/2", **changes), SMALL)
    folder = tmp_path / "out.parts"
    times = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    with pytest.raises(DataError, match=r"out.parts has \d+ of \d+ parts; the first missing one is of .*partition"):
        preprocess(settings(tmp_path, join_partitions=True, **changes), SMALL)
    lost = sorted(times)[0]
    shutil.rmtree(lost)
    (folder / f"{lost.name}.0123").mkdir()  # of a process that was killed
    capfd.readouterr()
    preprocess(settings(tmp_path, partition="1/1", **changes), SMALL)
    assert all(path.stat().st_mtime_ns == times[path] for path in times if path != lost)
    written = len([path for path in folder.iterdir() if "." not in path.name]) - len(times) + 1
    assert f"{written} of them written now" in capfd.readouterr().out
    assert outcome(tmp_path, join_partitions=True, **changes) == outcome(tmp_path, **changes)


def test_a_join_that_is_interrupted_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus(tmp_path)
    changes = {"input": (f"{tmp_path}/[a-g]*",)}
    expected = outcome(tmp_path, **changes)
    preprocess(settings(tmp_path, partition="1/1", **changes), SMALL)
    every = len(list((tmp_path / "out.parts").iterdir()))
    note, count = TokenOutput.note_part, [0]

    def interrupted(self: TokenOutput, part: object) -> None:
        note(self, part)
        count[0] += 1
        if count[0] == 5:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(TokenOutput, "note_part", interrupted)
        with pytest.raises(KeyboardInterrupt):
            preprocess(settings(tmp_path, join_partitions=True, **changes), SMALL)
    assert len(list((tmp_path / "out.parts").iterdir())) == every - 4  # the tokens of four parts are in the output
    assert outcome(tmp_path, join_partitions=True, **changes) == expected


def test_another_corpus_or_tokenizer_does_not_take_parts_of_this_one(tmp_path: Path) -> None:
    corpus(tmp_path)
    changes = {"input": (f"{tmp_path}/a.jsonl",)}
    preprocess(settings(tmp_path, partition="1/1", **changes), SMALL)
    with pytest.raises(DataError, match=r"out.parts has 0 of"):
        preprocess(settings(tmp_path, join_partitions=True, append_eod=True, **changes), SMALL)
    write_jsonl(tmp_path / "a.jsonl", texts(149))
    with pytest.raises(DataError, match=r"out.parts has 0 of"):
        preprocess(settings(tmp_path, join_partitions=True, **changes), SMALL)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"partition": "0/3"}, "--partition 0/3 must be I/N"),
        ({"partition": "4/3"}, "--partition 4/3 must be I/N"),
        ({"partition": "half"}, "--partition half must be I/N"),
        ({"partition": "1/3", "engine": "ray"}, "--engine ray and --partition exclude each other"),
        ({"keep_parts": True}, "--keep-parts has an effect only with --engine ray or --join-partitions"),
        ({"part_mebibytes": 0}, "--part-mebibytes 0 must be at least 1"),
    ],
)
def test_settings_that_cannot_be_obeyed(changes: dict, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        preprocess(settings(tmp_path, **changes))
