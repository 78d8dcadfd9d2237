"""A rank's own state in ``HostMemory``: written after every step, read after a failure, in the same layout."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_core.checkpoint.boxes import TensorBox
from megatron_core.checkpoint.manifest import TORCH_DTYPES
from megatron_core.checkpoint.writer import DTYPES
from megatron_core.errors import CheckpointError
from megatron_core.parallel.recovery.memory import HostMemory

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
        self._table, self._bytes = b"", 0
        self._offsets: list[int] = []

    @torch.no_grad()
    def write(self, iteration: int, pieces: Iterable[TensorBox], state: Mapping[str, Any]) -> int:
        """Copy ``pieces``, the state after ``iteration``; returns their bytes."""
        given = list(pieces)
        self._describe(given)
        if self._bytes > self._memory.room:
            raise CheckpointError(
                f"recover=in-process: the copies of {self._bytes} bytes of state do not fit into the host memory of "
                f"{self._memory.room} bytes; use more ranks or a higher --zero-stage"
            )
        room = self._memory.begin()
        targets = [
            room[at : at + piece.memory.nbytes].view(piece.memory.dtype).view(piece.memory.shape)
            for at, piece in zip(self._offsets, given, strict=True)
        ]
        torch._foreach_copy_(targets, [piece.memory for piece in given])
        self._memory.commit(iteration, self._table, dict(state), self._bytes)
        return self._bytes

    def _describe(self, pieces: list[TensorBox]) -> None:
        """Lay out the pieces, unless they are those of the previous copy."""
        keys = [_key(piece) for piece in pieces]
        if keys == self._keys:
            return
        table, at = [], 0
        self._offsets = []
        for piece in pieces:
            self._offsets.append(at)
            table.append([piece.name, piece.box.start, piece.box.stop, DTYPES[piece.memory.dtype], at])
            at += -(-piece.memory.nbytes // ALIGNED) * ALIGNED
        self._keys, self._bytes, self._table = keys, at, json.dumps(table).encode()


class HostCopy:
    """The copy of one iteration; the interface of ``CheckpointReader`` that loading uses."""

    def __init__(self, memory: HostMemory, iteration: int) -> None:
        """Errors: ``KeyError`` if ``memory`` has no copy of ``iteration``."""
        table, self.state, self._room = memory.choose(iteration)
        self.folder = Path("the copy in host memory")
        self._found: dict[Key, tuple[torch.dtype, int]] = {
            (name, tuple(start), tuple(stop)): (TORCH_DTYPES[dtype], at) for name, start, stop, dtype, at in table
        }
        self._names = {name for name, _, _ in self._found}

    def __enter__(self) -> HostCopy:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def has(self, name: str, shape: tuple[int, ...] | None = None) -> bool:
        """Whether this rank has a part of the tensor; its ``shape`` cannot have changed."""
        return name in self._names

    @torch.no_grad()
    def fill(self, pieces: Iterable[TensorBox]) -> None:
        """Copy the stored values into the memory of every piece. Errors: ``CheckpointError`` for an absent piece."""
        targets, sources = list[Tensor](), list[Tensor]()
        for piece in pieces:
            found = self._found.get(_key(piece))
            if found is None or found[0] != piece.memory.dtype:
                raise CheckpointError(f"{self.folder} of iteration {self.state['iteration']} has no {piece.name}")
            at = found[1]
            targets.append(piece.memory)
            sources.append(self._room[at : at + piece.memory.nbytes].view(found[0]).view(piece.memory.shape))
        if targets:
            torch._foreach_copy_(targets, sources)
