"""The check of a whole token file: valid files pass, and every fault is reported with its position."""

import struct
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from megatron_core.datasets import DatasetHeader, get_bin_path, get_idx_path, indexed
from megatron_core.errors import DataError
from megatron_core.preprocess import validate as validate_module
from megatron_core.preprocess.builder import write_header
from megatron_core.preprocess.validate import Checked, total_bytes, validate
from tests.datasets.files import index_by_hand, write

LENGTHS = [3, 0, 2, 4]
DOCUMENTS = [0, 2, 2, 4]
TOKENS = [10, 11, 12, 20, 21, 30, 31, 32, 33]
# Offsets of the parts of the index.
POINTERS_AT, DOCUMENTS_AT = 34 + 4 * 4, 34 + 12 * 4


@pytest.fixture(params=[1, 3, 1 << 20], ids=["blocks of 1", "blocks of 3", "one block"], autouse=True)
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also check across block boundaries."""
    for module in (indexed, validate_module):
        monkeypatch.setattr(module, "BLOCK", request.param)


def by_hand(
    folder: Path,
    tokens: Sequence[float] = TOKENS,
    code: int = 4,
    letter: str = "i",
    documents: Sequence[int] = DOCUMENTS,
) -> str:
    """Four sequences created only with struct; returns the prefix."""
    prefix = str(folder / "a")
    Path(get_bin_path(prefix)).write_bytes(struct.pack(f"<{len(tokens)}{letter}", *tokens))
    Path(get_idx_path(prefix)).write_bytes(index_by_hand(LENGTHS, struct.calcsize(letter), documents, code))
    return prefix


def edit(path: str, offset: int, content: bytes) -> None:
    """Overwrite bytes of a file."""
    whole = bytearray(Path(path).read_bytes())
    whole[offset : offset + len(content)] = content
    Path(path).write_bytes(whole)


def header(**changes: object) -> DatasetHeader:
    """A header that matches the files."""
    fields = {"vocab_size": 34, "eod": None, "append_eod": False, "documents": 3, "tokens": 9}
    return DatasetHeader(**{"tokenizer_type": "NullTokenizer", "fingerprint": "0", **fields, **changes})


def test_files_without_a_fault(tmp_path: Path) -> None:
    prefix = by_hand(tmp_path)
    seen: list[int] = []
    assert validate(prefix, 34, seen.append) == Checked(4, documents=3, tokens=9, largest_id=33, vocab_size=34)
    assert sum(seen) == total_bytes(prefix) == 9 * 4 + 12 * 4 + 8 * 4
    assert validate(prefix) == Checked(4, documents=3, tokens=9, largest_id=33, vocab_size=None)
    write_header(prefix, header())
    assert validate(prefix).vocab_size == 34


@pytest.mark.parametrize(("code", "letter"), [(1, "B"), (2, "b"), (3, "h"), (5, "q"), (6, "d"), (7, "f"), (8, "H")])
def test_every_dtype(code: int, letter: str, tmp_path: Path) -> None:
    assert validate(by_hand(tmp_path, TOKENS, code, letter), 34).largest_id == 33
    with pytest.raises(DataError, match=r"the token id 33(\.0)? \(sequence 3, token 3, byte \d+\), expected 0 to 32"):
        validate(by_hand(tmp_path, TOKENS, code, letter), 33)


def test_a_file_that_closes_no_document_is_sound(tmp_path: Path) -> None:
    assert validate(by_hand(tmp_path, documents=[0])).documents == 0


def test_a_file_built_here_is_sound(tmp_path: Path) -> None:
    prefix = write(tmp_path / "b", [[1, 2], [], [5], []], np.uint16)
    assert validate(prefix, 6) == Checked(4, documents=4, tokens=3, largest_id=5, vocab_size=6)


@pytest.mark.parametrize(
    ("place", "content", "sentence"),
    [
        (34 + 8, struct.pack("<i", -2), r"a\.idx:? .*sequence (2 has|of) -2 tokens.*, expected"),
        (
            34 + 8,
            struct.pack("<i", 1),
            rf"a\.idx: sequence 3 begins at byte 20 .* \(says byte {POINTERS_AT + 24}\), expected 16,",
        ),
        (POINTERS_AT, struct.pack("<q", 4), r"sequence 0 begins at byte 4 of the \.bin file .*, expected 0,"),
        (
            POINTERS_AT + 16,
            struct.pack("<q", 2**40 + 12),
            rf"sequence 2 begins at byte {2**40 + 12} .*byte {POINTERS_AT + 16}\), expected 12, where the one before",
        ),
        (
            DOCUMENTS_AT + 16,
            struct.pack("<q", 1),
            rf"entry 2 of the document index \(at byte {DOCUMENTS_AT + 16}\) is 1, expected 2 to 4",
        ),
        (DOCUMENTS_AT + 8, struct.pack("<q", 2**33), rf"entry 1 of the document index .* is {2**33}, expected 0 to 4"),
        (
            DOCUMENTS_AT + 24,
            struct.pack("<q", 3),
            rf"the document index \(at byte {DOCUMENTS_AT}\) ranges from 0 to 3, expected 0 to 4: sequences belong to",
        ),
    ],
)
def test_a_fault_of_the_index_is_named(place: int, content: bytes, sentence: str, tmp_path: Path) -> None:
    prefix = by_hand(tmp_path)
    edit(get_idx_path(prefix), place, content)
    with pytest.raises(DataError, match=sentence) as caught:
        validate(prefix, 34)
    assert "prepare the data again" in str(caught.value) and "\n" not in str(caught.value)


def test_a_document_index_that_does_not_begin_at_0(tmp_path: Path) -> None:
    prefix = by_hand(tmp_path)
    edit(get_idx_path(prefix), DOCUMENTS_AT, struct.pack("<q", 1))
    with pytest.raises(DataError, match=r"document index .*1"):
        validate(prefix)


@pytest.mark.parametrize(
    ("tokens", "code", "letter", "sentence"),
    [
        ([10, 11, 12, 20, 34, 30, 31, 32, 99], 4, "i", r"id 34 \(sequence 2, token 1, byte 16\), expected 0 to 33"),
        ([10, 11, 12, -1, 21, 30, 31, 32, 33], 4, "i", r"id -1 \(sequence 2, token 0, byte 12\), expected 0 to 33"),
        ([1.5, 11, 12, 20, 21, 30, 31, 32, 33], 7, "f", r"id 1\.5 \(sequence 0, token 0, byte 0\)"),
        ([1, 11, 12, 20, 21, 30, float("nan"), 32, 33], 6, "d", r"id nan \(sequence 3, token 1, byte 48\)"),
    ],
)
def test_a_token_id_out_of_the_vocabulary_is_named(
    tokens: list, code: int, letter: str, sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=rf"a\.bin: the token {sentence}.*give the --vocab-size or tokenizer"):
        validate(by_hand(tmp_path, tokens, code, letter), 34)


def test_without_a_vocabulary_only_negative_ids_are_faults(tmp_path: Path) -> None:
    prefix = by_hand(tmp_path, [2**31 - 1, *TOKENS[1:]])
    assert validate(prefix).largest_id == 2**31 - 1
    with pytest.raises(DataError, match=r"id -5 \(sequence 0, token 0, byte 0\), expected at least 0; copy both"):
        validate(by_hand(tmp_path, [-5, *TOKENS[1:]]))


def test_the_header_gives_the_vocabulary_and_is_checked(tmp_path: Path) -> None:
    prefix = by_hand(tmp_path)
    write_header(prefix, header(vocab_size=33))
    with pytest.raises(DataError, match=r"id 33 .*expected 0 to 32, the ids of a vocabulary of 33"):
        validate(prefix)
    assert validate(prefix, 34).largest_id == 33
    for name, said, found in (("documents", 4, 3), ("tokens", 10, 9)):
        write_header(prefix, header(**{name: said}))
        with pytest.raises(DataError, match=rf"a\.json says {name}={said}, but the files have {found}: .*same run"):
            validate(prefix)


def test_a_bin_file_of_another_size(tmp_path: Path) -> None:
    prefix = by_hand(tmp_path)
    path = Path(get_bin_path(prefix))
    whole = path.read_bytes()
    path.write_bytes(whole + b"\0\0\0\0")
    with pytest.raises(DataError, match=r"a\.bin has 40 bytes, expected 36 .*no sequence holds the bytes from 36 on"):
        validate(prefix)
    path.write_bytes(whole[:-1])
    with pytest.raises(DataError, match=r"a\.bin has 35 bytes, expected 36 .*truncated"):
        validate(prefix)


def test_files_without_a_token(tmp_path: Path) -> None:
    for documents in ([], [[]]):
        with pytest.raises(
            DataError, match=rf"b\.idx: {len(documents)} sequences have no tokens; prepare the data again"
        ):
            validate(write(tmp_path / "b", documents))


def test_memory_is_that_of_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validate_module, "BLOCK", 2000)
    peaks = []
    for name, count in (("small", 4_000), ("large", 20_000)):
        prefix = write(tmp_path / name, [[1, 2, 3]] * count)
        opened = []

        def progress(size: int, opened: list[int] = opened) -> None:
            if not opened:  # opening the files is not counted
                tracemalloc.start()
            opened.append(size)

        assert validate(prefix, 4, progress).tokens == 3 * count
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert 0 < peaks[1] < 1.1 * peaks[0] + 10_000
