"""Files whose offsets do not fit in 32 bits; they are sparse and use no disk space."""

import struct
from pathlib import Path

import numpy as np
import pytest

from megatron_core.datasets import DType, IndexedDataset, get_bin_path, get_idx_path
from megatron_core.errors import DataError
from megatron_core.preprocess.lengths import closed_document_lengths
from megatron_core.preprocess.validate import validate
from tests.datasets.files import index_by_hand

LONG = 2**31 - 1


def make(folder: Path) -> str:
    """Four sequences, two of the maximal length, in one document; the tokens are all 0."""
    prefix = str(folder / "large")
    Path(get_idx_path(prefix)).write_bytes(index_by_hand([LONG, LONG, 50, 50], 1, [0, 4], DType.uint8))
    with open(get_bin_path(prefix), "wb") as file:
        file.truncate(2 * LONG + 100)
    return prefix


def test_lengths_beyond_32_bits(tmp_path: Path) -> None:
    found = closed_document_lengths(IndexedDataset(make(tmp_path)))  # C46
    whole = 2 * LONG + 100
    assert (found.longest, found.mean, int(found.tokens.sum()), found.quantile(0.5)) == (whole,) * 4
    assert np.flatnonzero(found.documents).size == 1


def test_places_beyond_32_bits_are_checked(tmp_path: Path) -> None:
    prefix = make(tmp_path)
    path = Path(get_idx_path(prefix))
    content = bytearray(path.read_bytes())
    # The result of an offset computed in 32 bits.
    content[34 + 4 * 4 + 16 : 34 + 4 * 4 + 24] = struct.pack("<q", 2 * LONG - 2**32)
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"large\.idx: sequence 2 begins at byte -2 .*expected {2 * LONG}"):  # C46
        validate(prefix, 7)
