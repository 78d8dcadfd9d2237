"""Every line is read once wherever a file is cut, and what is wrong with one is said."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_core.datasets.prepare.documents import Batch, Limits
from megatron_core.datasets.prepare.inputs import describe
from megatron_core.datasets.prepare.read_lines import LineReader, parse
from megatron_core.datasets.prepare.streams import Stream
from tests.datasets.prepare.corpora import write_packed

LINES = st.lists(st.sampled_from(["", " ", '{"text": "abc"}', '{"text": ""}', '{"text": "' + "x" * 50 + '"}', "{"]))


def ranges(path: Path, cuts: list[int], limits: Limits) -> list[Batch]:
    """All batches of a file that is cut at some places, with places counted from the file's beginning."""
    reader, found, lines = LineReader(Stream(describe(path)), ["text"], limits), [], 0
    for start, stop in pairwise([0, *cuts, None]):
        for batch in reader.read(start, stop):
            batch.places = [place + lines for place in batch.places]
            batch.broken = [(place + lines, sentence) for place, sentence in batch.broken]
            lines += batch.lines
            found.append(batch)
    assert reader.ended
    reader.close()
    return found


@given(LINES, st.booleans(), st.lists(st.integers(1, 200), max_size=4), st.sampled_from(["a.jsonl", "a.jsonl.gz"]))
def test_cuts_change_nothing(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], end: bool, cuts: list[int], name: str
) -> None:
    path = write_packed(
        tmp_path_factory.mktemp("lines") / name, ("\n".join(lines) + ("\n" if end and lines else "")).encode()
    )
    batches = ranges(path, sorted(cuts), Limits(batch_bytes=40))
    expected = {n: json.loads(line)["text"] for n, line in enumerate(lines, 1) if line.startswith('{"')}
    assert {
        place: text for batch in batches for place, text in zip(batch.places, batch.texts[0], strict=True)
    } == expected
    broken = [place for batch in batches for place, _ in batch.broken]
    assert broken == [n for n, line in enumerate(lines, 1) if line == "{"]


@pytest.mark.parametrize("cuts", [[], [10], [40], [41], [60, 120], [100, 130]])
@pytest.mark.parametrize("end", ["\n", ""])
def test_a_long_line_is_left_out_wherever_it_is_cut(cuts: list[int], end: str, tmp_path: Path) -> None:
    exact = '{"text": "' + "x" * 48 + '"}'
    lines = ['{"text": "a"}', '{"text": "' + "x" * 49 + '"}', exact, '{"text": "' + "x" * 900 + '"}', '{"text": "b"}']
    path = tmp_path / "a.jsonl"
    for batch_bytes in (5, 30, 60):
        path.write_text("\n".join(lines) + end)
        batches = ranges(path, cuts, Limits(batch_bytes=batch_bytes, document_bytes=60))
        assert [place for batch in batches for place in batch.places] == [1, 3, 5]
        broken = [item for batch in batches for item in batch.broken]
        assert broken == [(n, "has more than 60 bytes; split it into several documents") for n in (2, 4)]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (b"{", "is no JSON"),
        (b'{"text": "a"} {"text": "b"}', "is no JSON"),
        (b'{"text": "\xff"}', "is no JSON"),
        (b"[" * 200_000, "is no JSON"),
        (b"[1]", "holds an array, expected an object such as"),
        (b'"text"', "holds a string, expected an object"),
        (b'{"body": "x"}', "has no key 'text'; its keys: body; choose with --json-keys"),
        (b'{"text": 5}', "has a number under 'text', expected a string"),
        (b'{"text": null}', "has null under 'text'"),
        (b'{"text": ["a"]}', "has an array under 'text'"),
        (rb'{"text": "\ud800"}', "has half of a surrogate pair"),
        (rb'{"text": "x\udc00"}', "has half of a surrogate pair"),
    ],
)
def test_faults_are_said(line: bytes, sentence: str) -> None:
    batch = parse(b'{"text": "a"}\n\n' + line + b'\n{"text": "b"}', ("text",))
    assert batch.texts == [("a", "b")] and batch.places == [1, 4] and batch.lines == 4
    ((place, found),) = batch.broken
    assert place == 3 and found.startswith(sentence) and "\n" not in found


def test_what_json_allows_is_read() -> None:
    lines = [rb'{"text": "a\u0000\n\ud83d\ude42"}', b'{"text": "old", "text": "new"}\r', b'\xef\xbb\xbf{"text": "bom"}']
    lines += [b' \t{"n": NaN, "te\\u0078t": "key"} ']
    assert parse(b"\n".join(lines), ("text",)).texts == [("a\x00\n\U0001f642", "new", "bom", "key")]
    assert parse(b'{"a": "1", "b": "2"}\n{"a": "1"}\n', ("a", "b")).texts == [("1",), ("2",)]
