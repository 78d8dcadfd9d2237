"""Placement of shards: on the device, in host memory, or in memory-mapped files.

Optimizers update element by element, so state on disk is updated in chunks: the kernel reads the next chunk during the
computation of one (``MADV_WILLNEED``), and a finished chunk is removed from memory (``MADV_DONTNEED``; the file keeps
it). Source: Rajbhandari et al. 2021 (ZeRO-Infinity), section 5.
"""

import mmap
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from megatron_core.errors import ConfigError
from megatron_core.output_file import make_folder, no_follow_new

CHUNK = 2**22
"""Elements per chunk: 16 MiB of each float32 tensor."""


class Placement:
    """Placement on the device of the weights, or with ``host`` in host memory."""

    def __init__(self, device: torch.device, *, host: bool = False) -> None:
        self.is_offloaded = host
        self.device = torch.device("cpu") if host and device.type != "meta" else device
        self.pinned = host and device.type == "cuda"

    def tensor(self, name: str, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a tensor of zeros in this placement."""
        return torch.zeros(numel, dtype=dtype, device=self.device, pin_memory=self.pinned)

    def chunks(self, numel: int) -> Iterator[slice]:
        """Yield the slices in which a shard is updated."""
        yield slice(0, numel)

    def prefetch(self) -> None:
        """Start to read the tensors into memory, if they are on disk."""

    def evict(self) -> None:
        """Remove the tensors from memory, if they are on disk."""


class DiskPlacement(Placement):
    """Placement in files of ``folder``, which are unlinked when opened and so disappear with the process."""

    def __init__(self, folder: Path, rank: int, setting: str) -> None:
        """Create ``folder``; ``setting`` is the name of its option, for error messages."""
        super().__init__(torch.device("cpu"))
        self.folder, self.rank, self.setting, self._maps = folder, rank, setting, list[tuple[mmap.mmap, int]]()
        try:
            make_folder(folder)
        except OSError as error:
            raise ConfigError(f"{setting}={str(folder)!r} cannot be used: {error}; give another") from None

    def tensor(self, name: str, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a tensor of zeros in a memory-mapped file."""
        path = self.folder / f"rank{self.rank:05d}_{os.getpid()}_{len(self._maps)}_{name}"
        size = numel * dtype.itemsize
        try:
            with open(path, "w+b", opener=no_follow_new) as file:
                path.unlink()
                os.posix_fallocate(file.fileno(), 0, size)  # report a full disk now, not as SIGBUS in a step
                mapped = mmap.mmap(file.fileno(), size)
        except OSError as error:
            raise ConfigError(
                f"{self.setting}={str(self.folder)!r} has no room for {size:,} bytes: {error}; give another folder, or "
                "offload less (--optimizer-offload-fraction)"
            ) from None
        self._maps.append((mapped, dtype.itemsize))
        return torch.frombuffer(mapped, dtype=dtype)

    def chunks(self, numel: int) -> Iterator[slice]:
        """Yield slices of ``CHUNK`` elements for a shard of ``numel`` elements; prefetch the next and evict the
        finished slice.
        """
        for start in range(0, numel, CHUNK):
            self._advise(mmap.MADV_WILLNEED, start + CHUNK, start + 2 * CHUNK)
            yield slice(start, min(start + CHUNK, numel))
            self._advise(mmap.MADV_DONTNEED, start, start + CHUNK)

    def prefetch(self) -> None:
        """Ask the kernel to read all files."""
        self._advise(mmap.MADV_WILLNEED, 0, sys.maxsize)

    def evict(self) -> None:
        """Remove all files from this process's memory."""
        self._advise(mmap.MADV_DONTNEED, 0, sys.maxsize)

    def _advise(self, advice: int, start: int, stop: int) -> None:
        for mapped, itemsize in self._maps:
            first, last = min(start * itemsize, len(mapped)), min(stop * itemsize, len(mapped))
            if first < last:  # the start of a chunk is aligned to a page
                mapped.madvise(advice, first, last - first)
