"""A rank's state in ``HostMemory``: written before every step, read after a failure, in the same or another layout.

In another layout, or in the place of another rank, a rank reads the parts that its own memory lacks from the keepers of
the ranks that have them.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_core.checkpoint.boxes import Box, TensorBox
from megatron_core.checkpoint.manifest import TORCH_DTYPES
from megatron_core.checkpoint.state_reader import StateReader
from megatron_core.checkpoint.writer import DTYPES
from megatron_core.errors import CheckpointError
from megatron_core.resilience.processes.keeper import RemoteCopy
from megatron_core.resilience.processes.memory import Copy, HostMemory

Key = tuple[str, tuple[int, ...], tuple[int, ...]]
"""Name, start and stop of a box."""
ALIGNED = 64


def _key(piece: TensorBox) -> Key:
    return piece.name, piece.box.start, piece.box.stop


class CopyWriter:
    """Writes all pieces of this rank, alternating between the two copies of ``memory``."""

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory
        self._keys: list[Key] = []
        self._table = b""
        self._bytes = 0
        self._offsets: list[int] = []
        self._targets: dict[int, list[Tensor]] = {}
        """The memory of the pieces in each of the two copies, by its address."""

    @torch.no_grad()
    def write(
        self, iteration: int, pieces: Sequence[TensorBox], state: Mapping[str, Any], *, rollbacks: int = 0
    ) -> int:
        """Copy ``pieces``, the state after ``iteration`` and ``rollbacks`` to a checkpoint; returns their bytes."""
        self._describe(pieces)
        if self._bytes > self._memory.room:
            raise CheckpointError(
                f"recover=in-process: the copies of {self._bytes} bytes of state do not fit into the host memory of "
                f"{self._memory.room} bytes; use more ranks or a higher --zero-stage"
            )
        room = self._memory.begin()
        targets = self._targets.get(room.data_ptr())
        if targets is None:
            targets = self._targets[room.data_ptr()] = [
                room[offset : offset + piece.memory.nbytes].view(piece.memory.dtype).view(piece.memory.shape)
                for offset, piece in zip(self._offsets, pieces, strict=True)
            ]
        torch._foreach_copy_(targets, [piece.memory for piece in pieces])
        self._memory.commit(iteration, self._table, dict(state), self._bytes, rollbacks)
        return self._bytes

    def _describe(self, pieces: Sequence[TensorBox]) -> None:
        """Lay out the pieces, unless they are those of the previous copy."""
        keys = [_key(piece) for piece in pieces]
        if keys == self._keys:
            return
        table = []
        offset = 0
        self._offsets = []
        self._targets.clear()
        for piece in pieces:
            self._offsets.append(offset)
            table.append([piece.name, piece.box.start, piece.box.stop, DTYPES[piece.memory.dtype], offset])
            offset += -(-piece.memory.nbytes // ALIGNED) * ALIGNED
        self._keys = keys
        self._bytes = offset
        self._table = json.dumps(table).encode()


class LocalCopy:
    """A copy in this host's memory."""

    def __init__(self, memory: HostMemory, copy: Copy) -> None:
        """Errors: ``KeyError`` if ``memory`` does not have it."""
        self.table, self.state, self._data = memory.read(copy)

    def read(self, spans: Sequence[tuple[int, int]]) -> list[Tensor]:
        """Views of the bytes of ``spans``, offsets and lengths."""
        return [self._data[offset : offset + length] for offset, length in spans]


@dataclass(frozen=True)
class _Stored:
    """A box in a copy."""

    source: int
    """The index of its copy."""
    box: Box
    dtype: torch.dtype
    offset: int

    @property
    def span(self) -> tuple[int, int]:
        return self.offset, self.box.numel * self.dtype.itemsize


class HostCopy(StateReader):
    """The copies of one iteration."""

    continues = True

    def __init__(self, sources: Iterable[LocalCopy | RemoteCopy]) -> None:
        """``sources``: opened in this order until all is found; boxes of a tensor are equal or disjoint in all of them.
        Errors: ``KeyError`` if there are none."""
        self._left = iter(sources)
        self._sources = list[LocalCopy | RemoteCopy]()
        self._found: dict[str, dict[Box, _Stored]] = {}
        self.folder = Path("the copy in host memory")
        if not self._open_next():
            raise KeyError("no copy")
        self.state: dict[str, Any] = json.loads(self._sources[0].state)

    def _open_next(self) -> bool:
        """Open another source; False if there is none."""
        source = next(self._left, None)
        if source is None:
            return False
        for name, start, stop, dtype, offset in json.loads(source.table):
            box = Box(tuple(start), tuple(stop))
            stored = _Stored(len(self._sources), box, TORCH_DTYPES[dtype], offset)
            self._found.setdefault(name, {}).setdefault(box, stored)
        self._sources.append(source)
        return True

    def has(self, name: str, shape: tuple[int, ...] | None = None) -> bool:
        """Whether there is a part of the tensor; its ``shape`` cannot have changed."""
        while name not in self._found:
            if not self._open_next():
                return False
        return True

    @torch.no_grad()
    def fill(self, pieces: Iterable[TensorBox]) -> None:
        """Copy the stored values into the memory of every piece. Errors: ``CheckpointError`` for absent elements."""
        wanted: dict[int, list[tuple[TensorBox, _Stored]]] = {}
        for piece in pieces:
            for stored in self._parts(piece):
                wanted.setdefault(stored.source, []).append((piece, stored))
        for number, boxes in wanted.items():
            source = self._sources[number]
            spans = [stored.span for _, stored in boxes]
            targets = list[Tensor]()
            values = list[Tensor]()
            for (piece, stored), view in zip(boxes, source.read(spans), strict=True):
                common = piece.box.intersect(stored.box)
                assert common is not None, "the box is a part of the piece"
                targets.append(piece.memory[common.within(piece.box)])
                values.append(_typed(view, stored)[common.within(stored.box)])
            torch._foreach_copy_(targets, values)

    def _parts(self, piece: TensorBox) -> list[_Stored]:
        """The boxes that ``piece`` consists of."""
        while True:
            boxes = self._found.get(piece.name, {})
            same = boxes.get(piece.box)
            sources = (
                [same] if same is not None else [stored for stored in boxes.values() if piece.box.intersect(stored.box)]
            )
            count = sum(common.numel for stored in sources if (common := piece.box.intersect(stored.box)) is not None)
            is_whole = count == piece.box.numel and all(stored.dtype == piece.memory.dtype for stored in sources)
            if is_whole:
                return sources
            if not self._open_next():
                raise CheckpointError(
                    f"{self.folder} of iteration {self.state['iteration']} has {count} of {piece.box.numel} elements "
                    f"of {piece.name}"
                )


def _typed(data: Tensor, stored: _Stored) -> Tensor:
    if data.storage_offset() * data.element_size() % stored.dtype.itemsize:
        data = data.clone()
    return data.view(stored.dtype).view(stored.box.shape)
