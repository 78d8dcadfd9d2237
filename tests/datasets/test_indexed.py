"""The .bin/.idx format: byte for byte as defined, and an error for every possible fault."""

import os
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron_core.datasets import DType, IndexedDataset, get_bin_path, get_idx_path
from megatron_core.errors import DataError
from megatron_core.preprocess.builder import IndexedDatasetBuilder
from tests.datasets.files import index_by_hand, write

LENGTHS = [3, 0, 2, 4]
DOCUMENTS = [0, 2, 2, 4]
TOKENS = [10, 11, 12, 20, 21, 30, 31, 32, 33]
CODES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}
LETTERS = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 6: "d", 7: "f", 8: "H"}


def by_hand(folder: Path, code: int, modes: tuple[int, ...] = ()) -> tuple[str, bytes, bytes]:
    """A pair of files of four sequences, created only with struct: prefix, .bin and .idx content."""
    prefix = str(folder / "hand")
    tokens = struct.pack(f"<{len(TOKENS)}{LETTERS[code]}", *TOKENS)
    index = index_by_hand(LENGTHS, struct.calcsize(LETTERS[code]), DOCUMENTS, code, modes)
    Path(get_bin_path(prefix)).write_bytes(tokens)
    Path(get_idx_path(prefix)).write_bytes(index)
    return prefix, tokens, index


def build_same(prefix: str, dtype: type, modes: tuple[int, ...] = ()) -> None:
    """The same four sequences through the builder."""
    modes_of = modes or (0, 0, 0, 0)
    with IndexedDatasetBuilder(get_bin_path(prefix), dtype, multimodal=bool(modes)) as builder:
        builder.add_document(np.array(TOKENS[:3]), [3, 0], modes_of[:2])
        builder.end_document()
        builder.add_item(TOKENS[3:5], modes_of[2])
        builder.add_item(TOKENS[5:], modes_of[3])
        builder.end_document()
        builder.finalize(get_idx_path(prefix))


@pytest.mark.parametrize("code", CODES)
def test_bytes_are_those_of_the_definition(code: int, tmp_path: Path) -> None:
    _, tokens, index = by_hand(tmp_path, code)
    built = str(tmp_path / "built")
    build_same(built, np.dtype(CODES[code]).type)
    assert Path(get_bin_path(built)).read_bytes() == tokens
    assert Path(get_idx_path(built)).read_bytes() == index


def test_multimodal_bytes(tmp_path: Path) -> None:
    prefix, tokens, index = by_hand(tmp_path, 4, (0, 1, 2, 1))
    built = str(tmp_path / "built")
    build_same(built, np.int32, (0, 1, 2, 1))
    assert Path(get_bin_path(built)).read_bytes() == tokens
    assert Path(get_idx_path(built)).read_bytes() == index
    dataset = IndexedDataset(prefix, multimodal=True)
    sequence, mode = dataset[2]
    assert (sequence.tolist(), mode) == ([20, 21], 2)
    sequences, modes = dataset[2:]
    assert ([s.tolist() for s in sequences], modes.tolist()) == ([[20, 21], [30, 31, 32, 33]], [2, 1])
    # If modes are not requested, the same tokens are read without them.
    assert IndexedDataset(prefix)[2].tolist() == [20, 21]


@pytest.mark.parametrize("missing", [".bin", ".idx"])
def test_one_file_of_two_does_not_exist(missing: str, tmp_path: Path) -> None:
    prefix, _, _ = by_hand(tmp_path, 4)
    Path(prefix + missing).unlink()
    assert not IndexedDataset.exists(prefix)


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("code", CODES)
def test_reading_a_file_made_by_hand(code: int, mmap: bool, tmp_path: Path) -> None:
    prefix, _, _ = by_hand(tmp_path, code)
    dataset = IndexedDataset(prefix, mmap=mmap)
    assert IndexedDataset.exists(prefix) and not IndexedDataset.exists(prefix + "x")
    assert len(dataset) == 4 and dataset.num_tokens == 9
    assert dataset.sequence_lengths.tolist() == LENGTHS and dataset.sequence_lengths.dtype == np.int32
    itemsize = DType.size(code)
    assert dataset.sequence_pointers.tolist() == [n * itemsize for n in (0, 3, 3, 5)]
    assert dataset.document_indices.tolist() == DOCUMENTS and dataset.sequence_modes is None
    assert [sequence.tolist() for sequence in dataset[:]] == [[10, 11, 12], [], [20, 21], [30, 31, 32, 33]]
    assert dataset[3].dtype == np.dtype(CODES[code]) and dataset[-1].tolist() == dataset[3].tolist()
    assert dataset.get(3, offset=1, length=2).tolist() == [31, 32]
    assert dataset.get(3, offset=3).tolist() == [33] and dataset.get(3, 4).tolist() == []
    assert [sequence.tolist() for sequence in dataset[1:3]] == [[], [20, 21]]


def test_reading_past_the_end(tmp_path: Path) -> None:
    dataset = IndexedDataset(by_hand(tmp_path, 4)[0])
    for index in (4, -5):
        with pytest.raises(IndexError):
            dataset[index]
    for offset, length in [(0, 5), (5, None), (-1, 1), (2, -1)]:
        with pytest.raises(IndexError):
            dataset.get(3, offset, length)
    with pytest.raises(ValueError, match="step 1"):
        dataset[::2]


@pytest.mark.parametrize("mmap", [True, False])
def test_nothing_in_the_files_is_fine(mmap: bool, tmp_path: Path) -> None:
    prefix = str(tmp_path / "empty")
    with IndexedDatasetBuilder(get_bin_path(prefix)) as builder:
        builder.add_item([])
        builder.finalize(get_idx_path(prefix))
    dataset = IndexedDataset(prefix, mmap=mmap)
    assert len(dataset) == 1 and dataset[0].tolist() == [] and dataset.document_indices.tolist() == [0]


def test_dtype_table() -> None:
    for code, name in CODES.items():
        assert DType.code_from_dtype(np.dtype(name)) == code
        assert DType.dtype_from_code(code) is np.dtype(name).type
        assert DType.size(code) == DType.size(np.dtype(name)) == np.dtype(name).itemsize
    cases = [(None, np.int32), (65499, np.uint16), (65500, np.int32), (257, np.uint16)]
    assert all(DType.optimal_dtype(size) is dtype for size, dtype in cases)
    with pytest.raises(ValueError):
        DType.dtype_from_code(9)


def edit(path: str, offset: int, content: bytes) -> None:
    """Overwrite bytes of a file."""
    whole = bytearray(Path(path).read_bytes())
    whole[offset : offset + len(content)] = content
    Path(path).write_bytes(whole)


def cut(path: str, by: int) -> None:
    """Truncate a file."""
    Path(path).write_bytes(Path(path).read_bytes()[:-by])


Damage = Callable[[str, str], None]
DAMAGES: dict[str, tuple[Damage, str]] = {
    "no bin": (lambda b, i: Path(b).unlink(), r"expected .*hand\.bin, found no such file"),
    "no idx": (lambda b, i: Path(i).unlink(), r"expected .*hand\.idx, found no such file"),
    "magic": (lambda b, i: edit(i, 0, b"TNTIDX\0\0\0"), r"hand\.idx is not an index.*begins with b'TNTIDX"),
    "version": (lambda b, i: edit(i, 9, b"\x02"), r"hand\.idx has version 2 of the format, expected 1"),
    "dtype": (
        lambda b, i: edit(i, 17, b"\x09"),
        r"unknown dtype code 9, expected one of 1 uint8, .*8 uint16",
    ),
    "no header": (lambda b, i: Path(i).write_bytes(b"MMIDIDX"), r"has 7 bytes, but the header has 34"),
    "empty": (lambda b, i: Path(i).write_bytes(b""), r"has 0 bytes, but the header has 34"),
    "short idx": (lambda b, i: cut(i, 1), r"hand\.idx has 113 bytes, expected 114 .*truncated"),
    "long idx": (
        lambda b, i: Path(i).write_bytes(Path(i).read_bytes() + b"x"),
        r"has 115 bytes, expected 114 .*longer",
    ),
    "short bin": (lambda b, i: cut(b, 1), r"hand\.bin has 35 bytes, expected 36 from .*hand\.idx"),
    "long bin": (
        lambda b, i: Path(b).write_bytes(Path(b).read_bytes() + bytes(4)),
        r"hand\.bin has 40 bytes, expected 36 from .*no sequence holds the bytes from 36 on",
    ),
    "other dtype": (lambda b, i: edit(i, 17, b"\x08"), r"sequence 1 begins at byte 12 .*, expected 6, where the"),
    "sequences of no document": (
        lambda b, i: Path(i).write_bytes(index_by_hand(LENGTHS, 4, [0, 2], 4)),
        r"document index .* ranges from 0 to 2, expected 0 to 4: sequences belong to no document",
    ),
    "tokens of no sequence": (
        lambda b, i: Path(i).write_bytes(index_by_hand([], 4, [0], 4)),
        r"hand\.bin has 36 bytes, expected 0 from .*hand\.idx \(0 tokens",
    ),
    "empty bin": (lambda b, i: Path(b).write_bytes(b""), r"hand\.bin has 0 bytes, expected 36"),
    "documents": (lambda b, i: edit(i, 34 + 48 + 24, b"\x09"), r"entry 3 of the document .* is 9, expected 2 to 4"),
    "documents fall": (lambda b, i: edit(i, 34 + 48 + 8, b"\x03"), r"entry 2 of the document .* is 2, expected 3 to 4"),
    "negative length": (lambda b, i: edit(i, 34, b"\xff" * 4), r"hand\.idx: sequence 0 has -1 tokens"),
    "pointer": (lambda b, i: edit(i, 34 + 16 + 16, b"\x08"), r"sequence 2 begins at byte 8 .*, expected 12, where the"),
    "no documents": (
        lambda b, i: Path(i).write_bytes(index_by_hand(LENGTHS, 4, [], 4)),
        r"entry 0 of the document index is missing, expected 0",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_told_on_opening(name: str, tmp_path: Path) -> None:
    prefix, _, _ = by_hand(tmp_path, 4)
    damage, sentence = DAMAGES[name]
    damage(get_bin_path(prefix), get_idx_path(prefix))
    with pytest.raises(DataError, match=sentence) as caught:
        IndexedDataset(prefix)
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)


def test_plain_file_is_not_multimodal(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="multimodal=False"):
        IndexedDataset(by_hand(tmp_path, 4)[0], multimodal=True)


def test_a_prefix_with_a_suffix_is_explained(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a_text_document", [[1, 2]])
    with pytest.raises(DataError, match=r"give only the prefix, .*a_text_document$"):
        IndexedDataset(get_bin_path(prefix))
    with pytest.raises(DataError, match=r"did you mean .*a_text_document"):
        IndexedDataset(str(tmp_path / "a"))


@pytest.mark.parametrize("mmap", [True, False])
def test_tokens_that_are_cut_off_during_a_run(mmap: bool, tmp_path: Path) -> None:
    """Reading beyond a mapped file would end the process by SIGBUS."""
    prefix, _, _ = by_hand(tmp_path, 4)
    dataset = IndexedDataset(prefix, mmap=mmap)
    os.truncate(get_bin_path(prefix), 16)
    assert dataset[0].tolist() == [10, 11, 12]
    with pytest.raises(DataError, match=r"hand\.bin was truncated after it was opened: it has 16 bytes, .* least 36"):
        dataset[3]
