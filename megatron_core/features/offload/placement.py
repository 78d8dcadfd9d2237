"""Placement of shards: on the device, in host memory, or in files.

Tensors in files are mapped for checkpoints. Training copies the parts that it needs: ``fetch`` and ``store`` read and
write them in helper threads, so that computation continues; the caller bounds the memory by the number of parts that it
has at a time. Optimizers update element by element, so state on disk is updated in chunks. Source: Rajbhandari et al.
2021 (ZeRO-Infinity), section 5.
"""

import mmap
import os
from collections.abc import Callable, Iterator
from functools import partial
from io import BufferedRandom
from pathlib import Path

import torch
from torch import Tensor

from megatron_core.data_parallel.memory import Placement, TransferHandle
from megatron_core.errors import ConfigError
from megatron_core.features.offload.transfer import lane
from megatron_core.output_file import make_folder
from megatron_core.parallel.handles import Done
from megatron_core.parallel.pinned import pinned_bytes
from megatron_core.prepared_output import no_follow_new

CHUNK = 2**22
"""Elements per chunk: 16 MiB of each float32 tensor."""


class HostPlacement(Placement):
    """Placement in host memory, pinned if the weights are on a GPU."""

    is_offloaded = True

    def __init__(self, device: torch.device) -> None:
        """``device``: the device of the weights; shards of weights on the meta device stay there."""
        super().__init__(device if device.type == "meta" else torch.device("cpu"))
        self._is_pinned = device.type == "cuda"

    def tensor(self, name: str, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a tensor of zeros in this placement."""
        if self._is_pinned and self.device.type == "cpu":
            return pinned_bytes(numel * dtype.itemsize).view(dtype)
        return torch.zeros(numel, dtype=dtype, device=self.device)

    def fetch(self, piece: Tensor, device: torch.device) -> tuple[Tensor, TransferHandle]:
        """Return memory on ``device`` that has the values of ``piece`` after the handle's ``wait``."""
        if device == piece.device:
            return piece, Done()
        memory = torch.empty_like(piece, device=device)
        return memory, lane("host copy_in", device).copy(memory, piece)


class DiskPlacement(Placement):
    """Placement in files of ``folder``, which are unlinked when opened and so disappear with the process."""

    is_offloaded = True
    is_mapped = True

    def __init__(self, folder: Path, rank: int, setting: str) -> None:
        """Create ``folder``; ``setting`` is the name of its option, for error messages."""
        super().__init__(torch.device("cpu"))
        self.folder = folder
        self.rank = rank
        self.setting = setting
        self._files: dict[int, tuple[BufferedRandom, mmap.mmap]] = {}
        """By the address of the mapped memory."""
        try:
            make_folder(folder)
        except OSError as error:
            raise ConfigError(f"{setting}={str(folder)!r} cannot be used: {error}; give another") from None

    def tensor(self, name: str, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a tensor of zeros in a memory-mapped file."""
        path = self.folder / f"rank{self.rank:05d}_{os.getpid()}_{len(self._files)}_{name}"
        size = numel * dtype.itemsize
        try:
            file = open(path, "w+b", opener=no_follow_new)  # noqa: SIM115 (open as long as this object exists)
            path.unlink()
            os.posix_fallocate(file.fileno(), 0, size)  # report a full disk now, not in a step
            mapped = mmap.mmap(file.fileno(), size)
        except OSError as error:
            raise ConfigError(
                f"{self.setting}={str(self.folder)!r} has no room for {size:,} bytes: {error}; give another folder, or "
                "offload less (--optimizer-offload-fraction)"
            ) from None
        tensor = torch.frombuffer(mapped, dtype=dtype)
        self._files[tensor.data_ptr()] = file, mapped
        return tensor

    def chunks(self, numel: int) -> Iterator[slice]:
        """Yield slices of ``CHUNK`` elements for a shard of ``numel`` elements."""
        for start in range(0, numel, CHUNK):
            yield slice(start, min(start + CHUNK, numel))

    def memory_for(self, piece: Tensor, spare: Tensor | None = None) -> Tensor:
        """Return ``spare`` if it is large enough, else new memory: its first use costs as much as reading the file."""
        if spare is not None and spare.dtype == piece.dtype and spare.numel() >= piece.numel():
            return spare[: piece.numel()]
        return torch.empty_like(piece)

    def read(self, piece: Tensor, memory: Tensor) -> TransferHandle:
        """Start to read ``piece`` in a helper thread."""
        call = partial(self._transfer, "reading", os.preadv, piece, memory)
        return lane("disk read").start(call, piece.nbytes)

    def fetch(self, piece: Tensor, device: torch.device) -> tuple[Tensor, TransferHandle]:
        """Start to read ``piece`` into host memory, which is pinned if ``device`` is a GPU."""
        memory = torch.empty_like(piece, pin_memory=device.type == "cuda")
        return memory, self.read(piece, memory)

    def store(self, piece: Tensor, values: Tensor) -> TransferHandle:
        """Start to write ``values`` in a helper thread."""
        call = partial(self._transfer, "writing", os.pwritev, piece, values)
        return lane("disk write").start(call, piece.nbytes)

    def evict(self) -> None:
        """Remove all files from this process's memory."""
        for _, mapped in self._files.values():
            mapped.madvise(mmap.MADV_DONTNEED)

    def _transfer(self, operation: str, call: Callable[..., int], piece: Tensor, memory: Tensor) -> None:
        """Read the file of ``piece`` into ``memory``, or write it; errors reach the thread that waits."""
        address = piece.untyped_storage().data_ptr()
        bytes_ = memory.view(torch.uint8).numpy().data
        file = self._files[address][0]
        offset = piece.data_ptr() - address
        try:
            while bytes_:
                moved = call(file.fileno(), [bytes_], offset)
                if moved == 0:
                    raise OSError("the file ends early")
                bytes_ = bytes_[moved:]
                offset = offset + moved
        except OSError as error:
            raise ConfigError(
                f"{self.setting}={str(self.folder)!r}: {operation} {piece.nbytes:,} bytes failed: {error}; give a "
                "folder on another disk, and load the last checkpoint"
            ) from None
