"""Plain text is cut at its separators, wherever ranges of the file begin."""

import time
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_core.datasets.prepare.documents import Limits
from megatron_core.datasets.prepare.inputs import describe
from megatron_core.datasets.prepare.read_text import TextReader
from megatron_core.datasets.prepare.streams import Stream


def read(path: Path, separator: str | None, cuts: list[int], limits: Limits) -> list[tuple[int, str | None]]:
    """Number and text of each document, None for a broken one."""
    reader, found, before = TextReader(Stream(describe(path)), 1, separator, limits), [], 0
    for start, stop in pairwise([0, *cuts, None]):
        for batch in reader.read(start, stop):
            found += [(before + place, text) for place, text in zip(batch.places, batch.texts[0], strict=True)]
            found += [(before + place, None) for place, _ in batch.broken]
            before += batch.lines
    assert reader.ended
    return sorted(found, key=lambda item: item[0])


@given(st.text("ab|", max_size=60), st.sampled_from(["|", "||", "ab", "aba"]), st.lists(st.integers(1, 60), max_size=3))
def test_cuts_change_nothing(
    tmp_path_factory: pytest.TempPathFactory, content: str, separator: str, cuts: list[int]
) -> None:
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_text(content)
    expected = content.split(separator)
    if not expected[-1]:
        expected.pop()
    found = read(path, separator, sorted(cuts), Limits(batch_bytes=5))
    assert found == list(enumerate(expected, 1))


def test_a_long_document_is_left_out_and_the_next_is_found(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    for size in (11, 65_535, 65_536, 300_000):
        path.write_text("a--" + "-x" * (size // 2) + "x" + "--b--" + "y" * 10)
        documents = path.read_text().split("--")
        expected = [(n, text if len(text) <= 10 else None) for n, text in enumerate(documents, 1)]
        for cuts in ([], [2], [5, 65_536], [size]):
            assert read(path, "--", cuts, Limits(document_bytes=10)) == expected


def test_the_time_for_a_long_document_is_in_proportion_to_it(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"word " * 8_000_000 + b"--last")
    begun = time.process_time()
    found = read(path, "--", [], Limits())
    # 0.3 s; where what was read before is copied at each read, 5 s.
    assert time.process_time() - begun < 2.5
    assert [(number, len(text)) for number, text in found] == [(1, 40_000_000), (2, 4)]


def test_without_a_separator_the_file_is_one_document(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffone\r\n\r\ntwo\n".encode())
    assert read(path, None, [], Limits()) == [(1, "one\r\n\r\ntwo\n")]
    path.write_bytes(b"")
    assert read(path, None, [], Limits()) == [(1, "")]
    path.write_bytes(b"x\xff")
    assert read(path, None, [], Limits()) == [(1, None)]
    path.write_bytes(b"x" * 11)
    assert read(path, None, [], Limits(document_bytes=10)) == [(1, None)]
