"""Token files for the tests, written by the builder or byte by byte."""

import struct
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from megatron_core.config import RunConfig
from megatron_core.datasets import Splits, get_bin_path, get_idx_path
from megatron_core.preprocess.builder import IndexedDatasetBuilder
from megatron_core.tokenizers import Tokenizer, tokenizer_of
from megatron_core.training.data import make_splits


def write(prefix: Path, documents: Sequence[Sequence[int]], dtype: type = np.int32) -> str:
    """A pair of files with one sequence per document; returns the prefix."""
    with IndexedDatasetBuilder(get_bin_path(str(prefix)), dtype) as builder:
        for document in documents:
            builder.add_document(document, [len(document)])
        builder.finalize(get_idx_path(str(prefix)))
    return str(prefix)


def write_counting(prefix: Path, lengths: Sequence[int], start: int = 0) -> str:
    """Documents of the given lengths whose tokens count up from `start` through the whole file."""
    borders = np.cumsum([start, *lengths])
    return write(prefix, [range(a, b) for a, b in pairwise(borders)])


def index_by_hand(
    lengths: Sequence[int], itemsize: int, documents: Sequence[int], code: int, modes: Sequence[int] = ()
) -> bytes:
    """The bytes of an .idx file, only from the definition of the format."""
    starts = [sum(lengths[:i]) * itemsize for i in range(len(lengths))]
    return b"".join(
        [
            b"\x4d\x4d\x49\x44\x49\x44\x58\x00\x00",
            struct.pack("<Q", 1),
            struct.pack("<B", code),
            struct.pack("<Q", len(lengths)),
            struct.pack("<Q", len(documents)),
            *(struct.pack("<i", length) for length in lengths),
            *(struct.pack("<q", start) for start in starts),
            *(struct.pack("<q", document) for document in documents),
            *(struct.pack("<b", mode) for mode in modes),
        ]
    )


class FakeIndexed:
    """A virtual file: token p of the text of all its sequences is p modulo 1000."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.path_prefix = "fake"
        self.sequence_lengths = np.array(lengths, dtype=np.int32)
        self.sequence_pointers = np.concatenate([[0], np.cumsum(lengths[:-1], dtype=np.int64)]).astype(np.int64)
        self.itemsize = 1

    def tokens(self, first: int, count: int) -> np.ndarray:
        """Tokens of the text."""
        assert first >= 0 and first + count <= int(self.sequence_lengths.sum(dtype=np.int64))
        return (np.arange(count, dtype=np.int64) + first % 1000) % 1000

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Tokens of a sequence."""
        assert offset >= 0 and int(self.sequence_lengths[idx]) >= offset + length
        return self.tokens(int(self.sequence_pointers[idx]) + offset, length)


def splits_of(tokenizer: Tokenizer | None = None, **settings: object) -> Splits:
    """The data sets of a run with these settings, by default with seed 1."""
    config = RunConfig.from_flat({"seed": 1, **settings})
    return make_splits(config, 1, tokenizer or tokenizer_of(config.data), 0)
