"""Divides files of a checkpoint into chunks and over readers, and makes messages of parts of chunks."""

import math
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron_core.checkpoint.boxes import Box
from megatron_core.locations import in_storage

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""Differs between running kernels; only on Linux."""
CHUNK_BYTES = 2**24
"""Bytes that are read at a time."""
ALIGNMENT = 16
"""Parts of a message begin at multiples of this number of bytes, so that they can be viewed in any dtype."""
MESSAGES = 4
"""Messages, each with parts of one chunk, that a rank sends at a time, and receives; they are on the device."""


@dataclass(frozen=True)
class Span:
    """A part of a tensor that is stored as consecutive bytes of a chunk."""

    tensor: int
    """Number of the tensor in the manifest."""
    box: Box
    dtype: torch.dtype
    offset: int
    """Offset in the chunk."""

    def values(self, data: Tensor) -> Tensor:
        """The values of the span in the bytes ``data`` of the chunk."""
        # A view in a wider dtype must begin at a multiple of its size. Tensors of several dtypes follow each other in a
        # file without padding, so that some do not.
        stored = data[self.offset : self.offset + self.box.numel * self.dtype.itemsize]
        stored = stored.clone() if stored.data_ptr() % self.dtype.itemsize else stored
        return viewed(stored, self.dtype, self.box.shape)


@dataclass(frozen=True)
class Chunk:
    """The bytes ``start ... stop - 1`` of a file."""

    file: str
    start: int
    stop: int
    spans: Sequence[Span]


Needs = Mapping[int, Sequence[Box]]
"""Boxes that a rank needs, by number of the tensor."""
Overlap = tuple[Span, Box, Box]
"""The intersection of a span with a needed box: the span, the needed box, the intersection."""


def readers_of(files: Mapping[str, int], ranks: int) -> dict[str, int]:
    """The rank that reads each of ``files`` (sizes by name): in order of the names, about equally many bytes a rank.

    Rank r therefore reads the file of rank r if the number of ranks is that of the saving job.
    """
    total = sum(files.values())
    before = 0
    readers = {}
    for name, size in sorted(files.items()):
        # The middle of the file decides, in integers: all ranks compute the same readers without a message.
        readers[name] = min(ranks - 1, (2 * before + size) * ranks // max(1, 2 * total))
        before += size
    return readers


def page_cache_of(folder: Path) -> str:
    """A name that is equal on ranks whose reads of files in ``folder`` share a page cache; empty in object storage, and
    if the folder cannot be read."""
    if in_storage(folder) is not None:
        return ""
    try:
        status = folder.stat()
    except OSError:
        return ""
    # Not the host's name: containers of one kernel have different names but one page cache, and hosts may have equal
    # names. Device and inode tell whether the path is the same folder in both.
    kernel = BOOT_ID.read_text().strip() if BOOT_ID.exists() else socket.gethostname()
    return f"{kernel} {status.st_dev} {status.st_ino}"


def group_of(rank: int, hosts: Sequence[str], files: int) -> list[int]:
    """The ranks that divide the files of a load with ``rank``: all ranks, or those of its host (``hosts``: a name, or
    "" in object storage, by rank) if there are fewer ``files`` than hosts.

    Hashes are those of consecutive bytes, so one rank has to read a whole file. With few files this rank would send
    them to all hosts while other disks are idle.
    """
    neighbours = [other for other, host in enumerate(hosts) if host == hosts[rank]]
    return neighbours if all(hosts) and files < len(set(hosts)) else list(range(len(hosts)))


def window_of(sender: int, receiver: int, ranks: int) -> int:
    """The window of a round in which ``sender`` sends to ``receiver``; each rank waits for a window's messages before
    it starts those of the next.

    In a window a rank sends to at most ``MESSAGES`` ranks and receives from as many, for any number of ``ranks``.
    Messages of the first unfinished window have both ends ready, so that ranks cannot wait for each other in a circle.
    """
    return ((receiver - sender) % ranks - 1) // MESSAGES


def blocks_of(box: Box, itemsize: int) -> Iterator[Box]:
    """Split ``box`` into parts of at most ``CHUNK_BYTES`` bytes that are consecutive in memory."""
    size = box.numel * itemsize
    shape = box.shape
    if size <= CHUNK_BYTES:
        yield box
        return
    # Only a split of the outermost dimension keeps each block consecutive in the file.
    dim = next(dim for dim, length in enumerate(shape) if length > 1)
    rows = max(1, CHUNK_BYTES * shape[dim] // size)
    for begin in range(box.start[dim], box.stop[dim], rows):
        end = min(begin + rows, box.stop[dim])
        start = (*box.start[:dim], begin, *box.start[dim + 1 :])
        yield from blocks_of(Box(start, (*box.stop[:dim], end, *box.stop[dim + 1 :])), itemsize)


def chunks_of(file: str, size: int, boxes: Iterable[tuple[int, int, torch.dtype, Box]]) -> Iterator[Chunk]:
    """Split a file of ``size`` bytes with ``boxes`` (offset, number of the tensor, dtype, box) into chunks."""
    start = 0
    spans = list[Span]()
    # Chunks cover the file without gaps, with its header and padding, because the hash is that of all bytes. They end
    # between blocks, so that each block is in one chunk.
    for offset, tensor, dtype, stored_box in sorted(boxes, key=lambda entry: entry[0]):
        for box in blocks_of(stored_box, dtype.itemsize):
            stop = offset + box.numel * dtype.itemsize
            if spans and stop - start > CHUNK_BYTES:
                yield Chunk(file, start, offset, spans)
                start = offset
                spans = []
            spans.append(Span(tensor, box, dtype, offset - start))
            offset = stop
    yield Chunk(file, start, size, spans)


def overlaps_of(chunk: Chunk, needs: Needs) -> Iterator[Overlap]:
    """The parts of ``chunk`` that a rank needs, in the order in which they are sent."""
    for span in chunk.spans:
        for box in needs.get(span.tensor, ()):
            common = span.box.intersect(box)
            if common is not None:
                yield span, box, common


def places_of(overlaps: Iterable[Overlap]) -> list[int]:
    """Offsets of the parts in their message, and its size."""
    offsets = [0]
    for span, _, common in overlaps:
        size = common.numel * span.dtype.itemsize
        offsets.append(offsets[-1] + math.ceil(size / ALIGNMENT) * ALIGNMENT)
    return offsets


def packed(overlaps: Sequence[Overlap], data: Tensor) -> Tensor:
    """The message with ``overlaps`` of the chunk ``data``."""
    offsets = places_of(overlaps)
    message = torch.zeros(offsets[-1], dtype=torch.uint8)
    for (span, _, common), offset in zip(overlaps, offsets, strict=False):
        room = message[offset : offset + common.numel * span.dtype.itemsize]
        viewed(room, span.dtype, common.shape).copy_(span.values(data)[common.within(span.box)])
    return message


def viewed(data: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """The bytes ``data`` as a tensor of ``dtype`` and ``shape``."""
    return data.view(dtype).view(shape)
