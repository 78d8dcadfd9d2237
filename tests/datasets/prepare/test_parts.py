"""The file of a part is whole or not there."""

from pathlib import Path

import numpy as np
import pytest

from megatron_core.datasets.aside import DiskFullError
from megatron_core.datasets.prepare.encode import Encoded
from megatron_core.datasets.prepare.parts import BlockHead, PartWriter, parts_in, read_part
from tests.datasets.prepare.corpora import file_size_limit

HEAD = BlockHead(
    source=0, lines=1, at=1, size=9, tokens=[1000], sequences=[1], documents=1, remarks=[(1, "empty", "is empty")]
)
TOKENS = Encoded(np.arange(1000, dtype="uint16"), np.array([1000], np.int32), np.ones(1, np.int32))


def written(folder: Path) -> None:
    """A part of 2 kB, less than is held back before it is written."""
    writer = PartWriter(folder, 0, 3)
    try:
        writer.add(HEAD, [TOKENS])
        writer.finish(last=True)
    finally:
        writer.close()


def test_what_is_written_is_read(tmp_path: Path) -> None:
    written(tmp_path)
    assert list(parts_in(tmp_path)) == [(0, 3, True)]
    (path,) = tmp_path.iterdir()
    [(head, [encoded])] = read_part(path, "uint16")
    assert (head.tokens, head.documents, head.remarks) == ([1000], 1, [[1, "empty", "is empty"]])
    for found, given in ((encoded.tokens, TOKENS.tokens), (encoded.lengths, TOKENS.lengths)):
        assert found.tolist() == given.tolist()


def test_no_room_for_its_last_bytes_is_told_and_leaves_no_part(tmp_path: Path) -> None:
    with file_size_limit(500), pytest.raises(DiskFullError, match=r"000000-00000003\.partial: .* at byte 500;"):
        written(tmp_path)
    assert list(parts_in(tmp_path)) == []
    assert list(tmp_path.iterdir()) == []
