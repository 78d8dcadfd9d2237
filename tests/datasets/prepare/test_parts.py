"""A part is on the shelf or in a file, and there it is whole or not there."""

from mmap import mmap
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest

from megatron_core.datasets.aside import DiskFullError
from megatron_core.datasets.prepare.encode import Encoded
from megatron_core.datasets.prepare.parts import BlockHead, PartWriter, parts_in, read_part
from megatron_core.datasets.prepare.shelf import Shelf
from tests.datasets.prepare.corpora import file_size_limit

HEAD = BlockHead(
    source=0, lines=1, at=1, size=9, tokens=[1000], sequences=[1], documents=1, remarks=[(1, "empty", "is empty")]
)
TOKENS = Encoded(np.arange(1000, dtype="uint16"), np.array([1000], np.int32), np.ones(1, np.int32))


def written(folder: Path, blocks: int = 1, shelf: Shelf | None = None, slot: int | None = None) -> bool:
    """A part of 2 kB a block, less than is held back before it is written; whether it is on the shelf."""
    writer = PartWriter(folder, 0, 3, shelf or Shelf(1, 1), slot)
    try:
        for _ in range(blocks):
            writer.add(HEAD, [TOKENS])
        return writer.finish(last=True)
    finally:
        writer.close()


def assert_read(part: BinaryIO | mmap, blocks: int = 1) -> None:
    found = list(read_part(part, "uint16"))
    assert len(found) == blocks
    for head, [encoded] in found:
        assert (head.tokens, head.documents, head.remarks) == ([1000], 1, [[1, "empty", "is empty"]])
        for mine, given in ((encoded.tokens, TOKENS.tokens), (encoded.lengths, TOKENS.lengths)):
            assert mine.tolist() == given.tolist()


def test_what_is_written_to_a_file_is_read(tmp_path: Path) -> None:
    assert not written(tmp_path)
    assert list(parts_in(tmp_path)) == [(0, 3, True)]
    (path,) = tmp_path.iterdir()
    with path.open("rb") as file:
        assert_read(file)


def test_a_part_on_the_shelf_needs_no_file(tmp_path: Path) -> None:
    shelf = Shelf(3, 5000)
    slots = [shelf.take() for _ in range(3)]
    assert shelf.take() is None
    for slot in slots:
        assert written(tmp_path, 2, shelf, slot)
    assert list(tmp_path.iterdir()) == []
    for slot in slots:
        assert_read(shelf.at(slot), 2)
    shelf.give_back(slots[1])
    assert shelf.take() == slots[1]


def test_a_part_that_outgrows_its_slot_goes_on_in_a_file(tmp_path: Path) -> None:
    for blocks, room in ((1, 100), (3, 5000)):
        shelf = Shelf(2, room)
        assert not written(tmp_path, blocks, shelf, 1)
        (path,) = tmp_path.iterdir()
        with path.open("rb") as file:
            assert_read(file, blocks)


def test_no_room_for_its_last_bytes_is_told_and_leaves_no_part(tmp_path: Path) -> None:
    with file_size_limit(500), pytest.raises(DiskFullError, match=r"000000-00000003\.partial: .* at byte 500;"):
        written(tmp_path)
    assert list(parts_in(tmp_path)) == []
    assert list(tmp_path.iterdir()) == []
