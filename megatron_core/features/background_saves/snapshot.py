"""Copies of a checkpoint's pieces in host memory, which a thread writes while training continues."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate
from threading import Thread

import torch
from torch import Tensor

from megatron_core.checkpoint.boxes import TensorBox
from megatron_core.parallel.pinned import pinned_bytes


class Snapshot:
    """Copies of pieces in CPU memory, in one buffer that is reused."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._reserving: Thread | None = None

    def reserve(self, pieces: Iterable[TensorBox]) -> None:
        """Start to allocate the buffer for ``pieces`` in a thread: locking the pages of 100 GB takes half a minute."""
        size = _offsets([piece for piece in pieces if piece.owned])[-1]
        device = torch.device("cuda", torch.cuda.current_device())

        def allocate() -> None:
            with suppress(RuntimeError, MemoryError):  # ``take`` tries again, and its error ends the save
                self._buffer = _host_bytes(size, device)

        self._reserving = Thread(target=allocate, name="checkpoint buffer", daemon=True)
        self._reserving.start()

    def take(
        self, later: Iterable[TensorBox], now: Iterable[TensorBox] = ()
    ) -> tuple[list[TensorBox], Callable[[], None]]:
        """The owned pieces as copies, and the function that copies those of ``later``, callable from any thread.

        ``later`` must not change until that function returns; ``now`` are copied immediately.
        """
        # Pieces that may change before the thread has run are copied now, in the caller. The others change only in the
        # update, which waits, so that their copies overlap with the step.
        first, second = ([piece for piece in pieces if piece.owned] for pieces in (later, now))
        offsets = _offsets(first + second)
        device = next((piece.memory.device for piece in first + second if piece.memory.is_cuda), None)
        if self._reserving is not None:
            self._reserving.join()
            self._reserving = None
        if self._buffer.numel() < offsets[-1]:
            self._buffer = _host_bytes(offsets[-1], device)
        copies = []
        for piece, offset in zip(first + second, offsets, strict=False):
            room = self._buffer[offset : offset + piece.memory.nbytes]
            copies.append(replace(piece, memory=room.view(piece.memory.dtype).view(piece.memory.shape)))
        _copy(second, copies[len(first) :])
        ready = None if device is None else torch.cuda.current_stream(device).record_event()

        def complete() -> None:
            if ready is None:
                return _copy(first, copies)
            # A thread's default device is GPU 0, where torch.cuda.stream would use memory.
            torch.cuda.set_device(device)
            # On the current stream, copies would wait between the kernels of the next step and delay them.
            stream = torch.cuda.Stream(device)
            stream.wait_event(ready)
            with torch.cuda.stream(stream):
                _copy(first, copies)
            stream.synchronize()

        return copies, complete


def _offsets(pieces: Sequence[TensorBox]) -> list[int]:
    """Offsets of the copies of ``pieces`` in a buffer, and its size."""
    # Multiples of 64 bytes: each copy can be viewed in its own dtype.
    return [0, *accumulate(-(-piece.memory.nbytes // 64) * 64 for piece in pieces)]


def _host_bytes(size: int, device: torch.device | None) -> Tensor:
    """Host memory for copies from ``device``; None is the CPU."""
    if device is None:
        return torch.empty(size, dtype=torch.uint8)
    torch.cuda.set_device(device)  # a thread's default device is GPU 0
    return pinned_bytes(size)


@torch.no_grad()
def _copy(pieces: Iterable[TensorBox], copies: Iterable[TensorBox]) -> None:
    for piece, copy in zip(pieces, copies, strict=False):
        copy.memory.copy_(piece.memory, non_blocking=True)
