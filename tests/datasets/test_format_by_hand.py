"""Any file of the format, created with struct from the definition, is read correctly and written bytewise equally."""

import struct
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_core.datasets import DType, IndexedDataset, get_bin_path, get_idx_path
from megatron_core.preprocess.builder import IndexedDatasetBuilder
from megatron_core.preprocess.validate import validate
from tests.datasets.files import index_by_hand

LETTERS = {
    "uint8": "B",
    "int8": "b",
    "int16": "h",
    "int32": "i",
    "int64": "q",
    "float64": "d",
    "float32": "f",
    "uint16": "H",
}


@st.composite
def files(draw: st.DrawFn) -> tuple[str, list[list[list[int]]], list[int] | None, bool]:
    """A dtype, documents of sequences of tokens, optional modes of all sequences, and whether documents are closed."""
    dtype = draw(st.sampled_from(sorted(LETTERS)))
    kind = np.dtype(dtype)
    # Floats represent these exactly; a file of floats is read and written like any other.
    low, high = (np.iinfo(kind).min, np.iinfo(kind).max) if kind.kind in "iu" else (-(2**20), 2**20)
    sequence = st.lists(st.integers(int(low), int(high)), max_size=5)
    documents = draw(st.lists(st.lists(sequence, max_size=3), max_size=4))
    count = sum(map(len, documents))
    modes = st.lists(st.integers(-128, 127), min_size=count, max_size=count) if count else st.none()
    return dtype, documents, draw(st.none() | modes), draw(st.booleans())


def bytes_by_hand(
    dtype: str, documents: list[list[list[int]]], modes: list[int] | None, closed: bool
) -> tuple[bytes, bytes]:
    """The .bin and .idx content, only from the definition."""
    sequences = [sequence for document in documents for sequence in document]
    tokens = [token for sequence in sequences for token in sequence]
    borders = [0]
    for document in documents if closed else ():
        borders.append(borders[-1] + len(document))
    code = int(DType[dtype])
    index = index_by_hand([len(s) for s in sequences], struct.calcsize(LETTERS[dtype]), borders, code, modes or ())
    return struct.pack(f"<{len(tokens)}{LETTERS[dtype]}", *tokens), index


@settings(max_examples=60, deadline=None)
@given(files())
def test_both_directions(made: tuple) -> None:
    dtype, documents, modes, closed = made
    content = bytes_by_hand(*made)
    with TemporaryDirectory() as folder:
        hand, built = f"{folder}/hand", f"{folder}/built"
        for path, part in zip((get_bin_path(hand), get_idx_path(hand)), content, strict=True):
            Path(path).write_bytes(part)
        dataset = IndexedDataset(hand, multimodal=modes is not None)
        assert np.dtype(dataset.dtype).name == dtype
        # Out of the file, and into another one.
        with IndexedDatasetBuilder(get_bin_path(built), dataset.dtype, modes is not None) as builder:
            for document in np.split(np.arange(len(dataset)), dataset.document_indices[1:]):
                for number in document:
                    sequence, mode = dataset[number] if modes is not None else (dataset[number], 0)
                    builder.add_item(sequence, mode)
                if builder.num_documents < len(dataset.document_indices) - 1:
                    builder.end_document()
            builder.finalize(get_idx_path(built))
        assert (Path(get_bin_path(built)).read_bytes(), Path(get_idx_path(built)).read_bytes()) == content
        read = [sequence.tolist() for sequence in (dataset[:] if modes is None else dataset[:][0])]
        assert read == [sequence for document in documents for sequence in document]
        if modes is not None:
            assert dataset.sequence_modes.tolist() == modes
        if closed and any(read) and min(map(min, filter(None, read))) >= 0:
            assert validate(hand).documents == len(documents)


@pytest.mark.parametrize("multimodal", [False, True])
def test_joining_files_made_by_hand(multimodal: bool, tmp_path: Path) -> None:
    """The index of two joined files is that of one file with the sequences of both."""
    parts = [[[[1, 2], []], [[3]]], [[], [[4, 5, 6]]]]
    modes = [[1, 2, 3], [4]] if multimodal else [None, None]
    for name, documents, own in zip("ab", parts, modes, strict=True):
        for suffix, content in zip(("bin", "idx"), bytes_by_hand("uint16", documents, own, True), strict=True):
            (tmp_path / f"{name}.{suffix}").write_bytes(content)
    joined = str(tmp_path / "joined")
    with IndexedDatasetBuilder(get_bin_path(joined), np.uint16, multimodal) as builder:
        for name in "ab":
            builder.add_index(str(tmp_path / name))
        builder.finalize(get_idx_path(joined))
    expected = bytes_by_hand("uint16", parts[0] + parts[1], [1, 2, 3, 4] if multimodal else None, True)
    assert (Path(get_bin_path(joined)).read_bytes(), Path(get_idx_path(joined)).read_bytes()) == expected
