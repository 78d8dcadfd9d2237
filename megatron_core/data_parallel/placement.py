"""Where shards lie: on the device, in the host's memory, or in files that are mapped into memory.

Optimizers update element by element, so that state on disk is updated a chunk at a time: while one is computed the
kernel reads the next (``MADV_WILLNEED``), and what is done leaves its memory (``MADV_DONTNEED``; the file keeps it).
Source: Rajbhandari et al. 2021 (ZeRO-Infinity), section 5.
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
"""Elements of a chunk: 16 MiB of each float32 tensor."""


class Placement:
    """Beside the weights, or with ``host`` in the host's memory."""

    def __init__(self, device: torch.device, *, host: bool = False) -> None:
        self.is_offloaded = host
        self.device = torch.device("cpu") if host and device.type != "meta" else device
        self.pinned = host and device.type == "cuda"

    def tensor(self, name: str, numel: int, dtype: torch.dtype) -> Tensor:
        """A tensor of zeros that stays there."""
        return torch.zeros(numel, dtype=dtype, device=self.device, pin_memory=self.pinned)

    def chunks(self, numel: int) -> Iterator[slice]:
        """The slices in which a shard is updated."""
        yield slice(0, numel)


class DiskPlacement(Placement):
    """In files of ``folder``, which are removed when they are open: they vanish with the process."""

    def __init__(self, folder: Path, rank: int, setting: str) -> None:
        """``setting`` is what named the folder."""
        super().__init__(torch.device("cpu"))
        self.folder, self.rank, self.setting, self._maps = folder, rank, setting, list[tuple[mmap.mmap, int]]()
        try:
            make_folder(folder)
        except OSError as error:
            raise ConfigError(f"{setting}={str(folder)!r} cannot be used: {error}; give another") from None

    def tensor(self, name: str, numel: int, dtype: torch.dtype) -> Tensor:
        """A tensor of zeros whose memory is a file."""
        path = self.folder / f"rank{self.rank:05d}_{os.getpid()}_{len(self._maps)}_{name}"
        size = numel * dtype.itemsize
        try:
            with open(path, "w+b", opener=no_follow_new) as file:
                path.unlink()
                os.posix_fallocate(file.fileno(), 0, size)  # a full disk shows now, not as a bus error in a step
                mapped = mmap.mmap(file.fileno(), size)
        except OSError as error:
            raise ConfigError(
                f"{self.setting}={str(self.folder)!r} has no room for {size:,} bytes: {error}; give another folder, or "
                "offload less (--optimizer-offload-fraction)"
            ) from None
        self._maps.append((mapped, dtype.itemsize))
        return torch.frombuffer(mapped, dtype=dtype)

    def chunks(self, numel: int) -> Iterator[slice]:
        """Slice after slice of the tensors that were made last for a shard of ``numel`` elements."""
        for start in range(0, numel, CHUNK):
            self._advise(mmap.MADV_WILLNEED, start + CHUNK, start + 2 * CHUNK)
            yield slice(start, min(start + CHUNK, numel))
            self._advise(mmap.MADV_DONTNEED, start, start + CHUNK)

    def prefetch(self) -> None:
        """Have the kernel read all of it."""
        self._advise(mmap.MADV_WILLNEED, 0, sys.maxsize)

    def evict(self) -> None:
        """Take all of it out of this process's memory."""
        self._advise(mmap.MADV_DONTNEED, 0, sys.maxsize)

    def _advise(self, advice: int, start: int, stop: int) -> None:
        for mapped, itemsize in self._maps:
            first, last = min(start * itemsize, len(mapped)), min(stop * itemsize, len(mapped))
            if first < last:  # CHUNK elements begin at a page
                mapped.madvise(advice, first, last - first)
