"""Every document is read exactly once from any start, and faults of documents and files are reported."""

import gzip
import json
import random
import time
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_core.preprocess import Limits
from megatron_core.preprocess.atomic_write import DiskFullError
from megatron_core.preprocess.inputs import DamagedFileError, Stream, describe_input
from megatron_core.preprocess.readers import content_blocks, parse_lines
from tests.preprocess.corpora import file_size_limit, write_packed

Document = tuple[int, str | None]
DATA = random.Random(0).randbytes(600_000) + b"end\n"


def read(
    path: Path,
    limits: Limits | None = None,
    separator: str | None = None,
    cuts: list[int] | None = None,
    restart: int | None = None,
) -> list[Document]:
    """Number and text of each document, None for a broken one.

    cuts: ranges in which the file is read. restart: after this number of blocks the file is read again from there.
    """
    source, found, lines = describe_input(path), [], 0
    ranges = list(zip([0, *(cuts or [])], [*(cuts or []), None], strict=True))
    for start, stop in ranges:
        for number, block in enumerate(
            content_blocks(source, ("text",), separator, limits or Limits(), path.parent, start, stop), 1
        ):
            batch = block.batch(("text",))
            found += [(lines + place, text) for place, text in zip(batch.numbers, batch.texts[0], strict=True)]
            found += [(lines + place, None) for place, _ in batch.broken]
            lines += batch.lines
            if number == restart:
                ranges.append((block.end, None))
                break
    return sorted(found, key=lambda item: item[0])


LINES = st.lists(st.sampled_from(["", " ", '{"text": "abc"}', '{"text": ""}', '{"text": "' + "x" * 50 + '"}', "{"]))


@settings(deadline=None)  # a busy machine
@given(LINES, st.booleans(), st.lists(st.integers(1, 200), max_size=4), st.sampled_from(["", ".gz"]), st.integers(1, 9))
def test_lines(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], end: bool, cuts: list[int], suffix: str, restart: int
) -> None:
    content = ("\n".join(lines) + ("\n" if end and lines else "")).encode()
    path = write_packed(tmp_path_factory.mktemp("lines") / f"a.jsonl{suffix}", content)
    expected = [
        (n, json.loads(line)["text"] if line != "{" else None) for n, line in enumerate(lines, 1) if line.strip()
    ]
    assert read(path, Limits(batch_bytes=40), cuts=sorted(cuts)) == expected
    assert read(path, Limits(batch_bytes=40), restart=restart) == expected


@settings(deadline=None)  # a busy machine
@given(
    st.text("ab|", max_size=60),
    st.sampled_from(["|", "||", "ab", "aba"]),
    st.sampled_from(["", ".gz"]),
    st.integers(1, 9),
)
def test_text_with_separators(
    tmp_path_factory: pytest.TempPathFactory, content: str, separator: str, suffix: str, restart: int
) -> None:
    path = write_packed(tmp_path_factory.mktemp("text") / f"a.txt{suffix}", content.encode())
    documents = content.split(separator)
    if not documents[-1]:
        documents.pop()
    expected = list(enumerate(documents, 1))
    assert read(path, Limits(batch_bytes=5), separator) == expected
    assert read(path, Limits(batch_bytes=5), separator, restart=restart) == expected


def test_text_without_a_separator_is_one_document(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    for content, limits, expected in (
        ("\ufeffone\r\n\r\ntwo\n".encode(), Limits(), "one\r\n\r\ntwo\n"),
        (b"", Limits(), ""),
        (b"x\xff", Limits(), None),
        (b"x" * 11, Limits(document_bytes=10), None),
    ):
        path.write_bytes(content)
        assert read(path, limits) == [(1, expected)]


@pytest.mark.parametrize("cuts", [[], [10], [40], [41], [60, 120], [100, 130]])
@pytest.mark.parametrize("end", ["\n", ""])
def test_a_long_line_is_left_out_wherever_the_file_is_divided(cuts: list[int], end: str, tmp_path: Path) -> None:
    exact = '{"text": "' + "x" * 48 + '"}'
    lines = ['{"text": "a"}', '{"text": "' + "x" * 49 + '"}', exact, '{"text": "' + "x" * 900 + '"}', '{"text": "b"}']
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(lines) + end)
    for batch_bytes in (5, 30, 60):
        found = read(path, Limits(batch_bytes=batch_bytes, document_bytes=60), cuts=cuts)
        assert found == [(1, "a"), (2, None), (3, "x" * 48), (4, None), (5, "b")]


def test_a_long_text_is_left_out_and_the_next_is_found(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    for size in (11, 65_535, 65_536, 300_000):
        path.write_text("a--" + "-x" * (size // 2) + "x" + "--b--" + "y" * 10)
        expected = [(n, text if len(text) <= 10 else None) for n, text in enumerate(path.read_text().split("--"), 1)]
        for restart in (None, 1, 2):
            assert read(path, Limits(document_bytes=10, batch_bytes=1), "--", restart=restart) == expected


def test_the_time_for_a_long_text_is_in_proportion_to_it(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"word " * 8_000_000 + b"--last")
    begun = time.process_time()
    found = read(path, separator="--")
    # 0.3 s; if data were copied at each read, 5 s.
    assert time.process_time() - begun < 2.5
    assert [(number, len(text)) for number, text in found] == [(1, 40_000_000), (2, 4)]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (b"{", "is not JSON"),
        (b'{"text": "a"} {"text": "b"}', "is not JSON"),
        (b'{"text": "\xff"}', "is not JSON"),
        (b'{"a":' * 200_000, "is not JSON"),
        (b"[" * 200_000, "begins a JSON array"),
        (b'[{"text": "a"}]', "begins a JSON array, expected an object such as"),
        (b"\xef\xbb\xbf [", "begins a JSON array"),
        (b'"text"', "is a string, expected an object"),
        (b'{"body": "x"}', "has no key 'text'; its keys: body; choose with --json-keys"),
        (b'{"text": 5}', "has a number under 'text', expected a string"),
        (b'{"text": ["a"]}', "has an array under 'text'"),
        (rb'{"text": "\ud800"}', "has half of a surrogate pair"),
        (rb'{"text": "x\udc00"}', "has half of a surrogate pair"),
    ],
)
def test_faults_of_lines_are_named(line: bytes, sentence: str) -> None:
    batch = parse_lines(b'{"text": "a"}\n\n' + line + b'\n{"text": "b"}', ("text",))
    assert batch.texts == [("a", "b")] and batch.numbers == [1, 4] and batch.lines == 4
    ((number, found),) = batch.broken
    assert number == 3 and found.startswith(sentence) and "\n" not in found


def test_what_json_allows_is_read() -> None:
    lines = [rb'{"text": "a\u0000\n\ud83d\ude42"}', b'{"text": "old", "text": "new"}\r', b'\xef\xbb\xbf{"text": "bom"}']
    lines += [b' \t{"n": NaN, "te\\u0078t": "key"} ', b'{"text": null}']
    assert parse_lines(b"\n".join(lines), ("text",)).texts == [("a\x00\n\U0001f642", "new", "bom", "key", "")]
    assert parse_lines(b'{"a": "1", "b": "2"}\n{"a": "1"}\n', ("a", "b")).texts == [("1",), ("2",)]


@pytest.mark.parametrize("content", ['[{"text": "a"}, {"text": "b"}]', '\n[\n  {"text": "a"},\n  {"text": "b"}\n]\n'])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_file_that_is_one_array_is_named_with_a_way_to_convert_it(content: str, suffix: str, tmp_path: Path) -> None:
    path = write_packed(tmp_path / f"a.json{suffix}", content.encode())
    with pytest.raises(
        DamagedFileError, match=r"is a JSON array, expected one object per line .* jq -c '\.\[\]' .*a\."
    ):
        read(path)


ROWS = ["a", None, "", "Gr\u00fc\u00dfe", "x" * 100] * 20


def write_parquet(path: Path, column: pyarrow.Array) -> Path:
    """A file of row groups of 7 rows."""
    pyarrow.parquet.write_table(pyarrow.table({"n": range(len(column)), "text": column}), path, row_group_size=7)
    return path


CATEGORIES = pyarrow.dictionary(pyarrow.int32(), pyarrow.string())


@pytest.mark.parametrize("kind", [pyarrow.string(), pyarrow.large_string(), pyarrow.binary(), CATEGORIES])
def test_parquet_rows(kind: pyarrow.DataType, tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", pyarrow.array(ROWS, kind))
    expected = [(n, row or "") for n, row in enumerate(ROWS, 1)]
    assert read(path) == read(path, Limits(batch_bytes=20)) == expected
    for restart in (1, 3, 20):
        assert read(path, Limits(batch_bytes=200), restart=restart) == expected
    assert read(path, cuts=[10, 14, 31]) == expected


@pytest.mark.parametrize("column", [[["a"], ["b"]], [{"string": "a"}, {"string": "b"}], [1, 2]])
def test_columns_without_text_are_named(column: list, tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", pyarrow.array(column))
    with pytest.raises(
        DamagedFileError, match=r"a\.parquet has (list|struct|int64).* in column 'text', expected strings"
    ):
        read(path)


def test_compressed_parquet_and_the_copy_of_an_older_file(tmp_path: Path) -> None:
    packed = tmp_path / "a.parquet.gz"
    for rows in (["old"] * 3, ["new"] * 4):
        packed.write_bytes(gzip.compress(write_parquet(tmp_path / "plain", pyarrow.array(rows)).read_bytes()))
        assert read(packed) == list(enumerate(rows, 1))
    for copy in tmp_path.glob("*.parquet"):
        copy.unlink()
    with file_size_limit(100), pytest.raises(DiskFullError, match=r"\.partial: the file may not become larger here"):
        read(packed)
    assert read(packed) == list(enumerate(rows, 1))


def test_broken_rows_are_left_out(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", pyarrow.array([b"a", b"\xff", b"b" * 20], pyarrow.binary()))
    assert read(path, Limits(document_bytes=10)) == [(1, "a"), (2, None), (3, None)]


def test_faults_of_parquet_files_are_named(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", pyarrow.array(["abc" * 50] * 20))
    for key, sentence in (
        ("body", "has no column 'body'; its columns: n, text; choose"),
        ("n", "has int64 in column 'n'"),
    ):
        with pytest.raises(DamagedFileError, match=rf"a\.parquet {sentence}"):
            list(content_blocks(describe_input(path), [key], None, Limits(), tmp_path))
    data = path.read_bytes()
    path.write_bytes(data[:600] + bytes(200) + data[800:])
    with pytest.raises(DamagedFileError, match=r"a\.parquet is damaged in row group \d, after row \d+ "):
        read(path)
    path.write_bytes(data[:-20])
    with pytest.raises(DamagedFileError, match=r"a\.parquet is truncated, or not a Parquet file"):
        read(path)


def compressed(kind: str, *pieces: bytes) -> bytes:
    """The pieces, each compressed separately."""
    compress = {"gz": gzip.compress, "zst": zstandard.compress, "txt": bytes}[kind]
    return b"".join(compress(piece) for piece in pieces)


@pytest.mark.parametrize("kind", ["gz", "zst", "txt"])
def test_streams_of_several_members(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"a.{kind}"
    path.write_bytes(compressed(kind, DATA[:10], b"", DATA[10:300_000], DATA[300_000:]))
    with Stream(describe_input(path)) as stream:
        assert stream.read(7) == DATA[:7]
        stream.skip_to(400_000)
        assert (stream.position, stream.read(5)) == (400_000, DATA[400_000:400_005])
        stream.skip_to(600_000)
        assert stream.readline(100) == b"end\n" and stream.read(1) == b"" and stream.position == len(DATA)
        assert stream.raw == path.stat().st_size


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_damaged_and_empty_streams(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"a.{kind}"
    data = compressed(kind, DATA[:1000], DATA[1000:])
    for content, sentence in [
        *((data[:-cut], r"is truncated: its \w+ data ends early, after [\d,]+ bytes") for cut in (1, 5, 100_000)),
        (b"no compressed data at all", "is damaged after 0 bytes of content, or no"),
        (compressed(kind, DATA)[:1000] + bytes(2000), "is (damaged|truncated)"),
    ]:
        path.write_bytes(content)
        with pytest.raises(DamagedFileError, match=rf"a\.{kind} {sentence}"), Stream(describe_input(path)) as stream:
            while stream.read(1 << 16):
                pass
    for content in (b"", compressed(kind, b"", b"")):
        path.write_bytes(content)
        with Stream(describe_input(path)) as stream:
            assert stream.read(1) == b""


@pytest.mark.parametrize("kind", ["gz", "zst"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_a_decompression_bomb_is_refused(name: str, kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"{name}.{kind}"
    path.write_bytes(compressed(kind, b"\n" * (64 << 20)))
    start = time.monotonic()
    with pytest.raises(DamagedFileError, match=rf"{name}\.{kind} expands to more than 500 times its size"):
        read(path, separator="\n" * 1000)
    path.write_bytes(compressed(kind, b"\n" * (3 << 20) + b'{"text": "abc"}\n'))
    assert "abc" in read(path)[0][1]
    assert time.monotonic() - start < 10


def test_a_parquet_file_of_empty_rows_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": pyarrow.nulls(2_000_000, pyarrow.string())}), path)
    with pytest.raises(DamagedFileError, match=r"a\.parquet has 2,000,000 rows in [\d,]+ bytes, as a decompression"):
        read(path)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = write_packed(tmp_path / "a.jsonl", b"{}\n")
    source = describe_input(path)
    path.unlink()
    with pytest.raises(DamagedFileError, match=r"a\.jsonl cannot be read after byte 0 .*\(No such file or directory\)"):
        Stream(source)


def test_a_part_inside_a_long_line_reads_no_further_than_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the time for one line grows with the square of its length: 280 s for 1 GB."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "' + b"x" * 2_000_000 + b'"}\n')
    monkeypatch.setattr("megatron_core.preprocess.readers.BUFFER_BYTES", 1000)
    seen = []
    monkeypatch.setattr(
        Stream, "readline", lambda own, size, of=Stream.readline: seen.append(of(own, size)) or seen[-1]
    )
    assert list(content_blocks(describe_input(path), ("text",), None, Limits(), tmp_path, 500_000, 600_000)) == []
    assert 99_000 <= sum(map(len, seen)) <= 102_000


@pytest.mark.parametrize("begin", [b"ARROW1\0\0", b"BZh9", b"PK\3\4"])
def test_files_of_other_formats_are_named(begin: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    path.write_bytes(begin + b"\xff\xfe")
    (block,) = content_blocks(describe_input(path), ("text",), None, Limits(), tmp_path)
    ((_, fault),) = block.batch(("text",)).broken
    assert "write it as Parquet, .gz or .zst" in fault
