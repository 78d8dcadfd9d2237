"""Reads a checkpoint in one pass: one rank of the job reads each file in large chunks, hashes it meanwhile, and sends
the parts that ranks on other hosts need.

Ranks work in rounds: in round k every rank sends parts of its k-th chunk. With fewer files than hosts, each host reads
all files for itself.
"""

# Replicas do not read the same bytes from the disk again, and hashes cost no second pass. Ranks on the host of the
# reader read their parts of a chunk from the page cache, which takes half of the processor time of a message. The
# messages of a round are sent in windows of a few, so that memory does not grow with the number of ranks. Damage is
# reported on all ranks after the last round, so that no rank waits.

import json
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from xxhash import xxh3_128

from megatron_core.checkpoint.boxes import Box, TensorBox
from megatron_core.checkpoint.chunks import (
    Chunk,
    Needs,
    Overlap,
    Span,
    chunks_of,
    group_of,
    overlaps_of,
    packed,
    page_cache_of,
    places_of,
    readers_of,
    viewed,
    window_of,
)
from megatron_core.checkpoint.hashes import StoredFile, inside
from megatron_core.checkpoint.manifest import MANIFEST, TORCH_DTYPES, Manifest, StoredTensor
from megatron_core.errors import CheckpointError
from megatron_core.locations import ObjectPath, in_storage, read_part
from megatron_core.parallel.texts import gather_from_all_ranks

THREADS = 2
"""Threads that read chunks ahead; 2 GB were read in 0.82 of the time of one."""


_MOST_HEADER_BYTES = 100_000_000
"""The limit of the format."""
FAULTS = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError)
"""Errors that a file of any content may cause while it is read."""


def read_tensor_header(path: Path) -> tuple[int, dict[str, Any]]:
    """The offset of the data in a safetensors file, and its header. Errors: ``OSError``, ``ValueError`` if it is
    damaged."""
    length = int.from_bytes(read_part(path, 0, 8), "little")
    if not 0 < length <= _MOST_HEADER_BYTES:
        raise ValueError(f"its header has {length} bytes")
    try:
        header = json.loads(read_part(path, 8, length))
    except RecursionError:
        raise ValueError("its header is nested too deeply") from None
    if not isinstance(header, dict) or not isinstance(header.get("__metadata__") or {}, dict):
        raise ValueError("its header, or __metadata__ in it, is not an object")
    return 8 + length, header


class DamagedCheckpoint(CheckpointError):
    """Files of the checkpoint in ``folder`` were found damaged while they were read; raised on all ranks."""

    def __init__(self, folder: Path, message: str) -> None:
        super().__init__(message)
        self.folder = folder


class OnePass:
    """One load of the checkpoint in ``folder``; ``hashed``: hash the files and compare."""

    def __init__(self, folder: Path, manifest: Manifest, device: torch.device, *, hashed: bool) -> None:
        self._folder = folder
        self._manifest = manifest
        self._device = device
        self._hashed = hashed
        self._rank, self._ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self._numbers = {name: number for number, name in enumerate(manifest.tensors)}
        self._boxes = defaultdict[str, list[tuple[str, StoredTensor, str, Box]]](list)
        for name, tensor in manifest.tensors.items():
            for stored in tensor.boxes:
                self._boxes[stored.file].append((name, tensor, stored.key, stored.box))
        self._sizes = {file: manifest.files[file].size for file in self._boxes}
        self._readers = readers_of(self._sizes, self._ranks)
        self._memory = defaultdict[tuple[int, Box], list[Tensor]](list)
        self._by_rank: list[dict[str, Any]] = []
        self._near = torch.empty(0, dtype=torch.uint8)

    def fill(self, pieces: Iterable[tuple[str, TensorBox]]) -> None:
        """Copy the stored values into the memory of ``pieces``, each with the name of its tensor; all ranks call this.

        Errors: ``CheckpointError`` on all ranks; ``DamagedCheckpoint`` if files are damaged.
        """
        needs = defaultdict[int, list[Box]](list)
        for name, piece in pieces:
            number = self._numbers[name]
            # Weights and main weights are read from the same tensor: a box is requested once and copied to both.
            if (number, piece.box) not in self._memory and piece.box.numel:
                needs[number].append(piece.box)
            self._memory[number, piece.box].append(piece.memory)
        self._tell(needs)
        group = group_of(self._rank, [report["host"] for report in self._by_rank], len(self._sizes))
        plans = self._plans(group)
        everyone = [
            {int(n): [Box(*map(tuple, box)) for box in boxes] for n, boxes in report["needs"].items()}
            if rank in group else {}
            for rank, report in enumerate(self._by_rank)
        ]  # fmt: skip
        by_rank = gather_from_all_ranks("\n".join(self._run_rounds(plans, everyone)), self._device)
        self._raise([fault for text in by_rank for fault in text.splitlines()])

    def _tell(self, needs: Needs) -> None:
        """Tell all ranks what this rank needs, and where the boxes are in the files that it reads."""
        faults = list[str]()
        offsets = dict[str, list[int]]()
        for file in (file for file, reader in self._readers.items() if reader == self._rank):
            try:
                offsets[file] = self._offsets(file)
            except FAULTS as error:
                faults.append(f"{self._folder / file} cannot be read: {error}")
        lists = {number: [[box.start, box.stop] for box in boxes] for number, boxes in needs.items()}
        report = {"needs": lists, "offsets": offsets, "faults": faults, "host": page_cache_of(self._folder)}
        text = json.dumps(report, separators=(",", ":"))
        self._by_rank = [json.loads(text) for text in gather_from_all_ranks(text, self._device)]
        # All ranks have the same reports, and raise together before the first round.
        self._raise([fault for other in self._by_rank for fault in other["faults"]])

    def _offsets(self, file: str) -> list[int]:
        """Offsets of the boxes of ``file``, whose header must agree with the manifest."""
        data_begin, header = read_tensor_header(inside(self._folder, file))
        metadata = header.get("__metadata__") or {}
        save = (self._manifest.save_id, str(self._manifest.iteration))
        if (metadata.get("save_id"), metadata.get("iteration")) != save:
            raise ValueError(f"it was written by another save (iteration {metadata.get('iteration', 'unknown')})")
        offsets = list[int]()
        for _, tensor, key, box in self._boxes[file]:
            if key not in header:
                raise ValueError(f"it has no {key}")
            entry = header[key]
            begin, end = entry["data_offsets"]
            stored = (entry["dtype"], tuple(entry["shape"]))
            size = box.numel * TORCH_DTYPES[tensor.dtype].itemsize
            fits = type(begin) is type(end) is int and end - begin == size
            is_inside = fits and begin >= 0 and data_begin + end <= self._manifest.files[file].size
            if stored != (tensor.dtype, box.shape) or not is_inside:
                raise ValueError(f"{key} is {stored[0]} {list(stored[1])}, not {tensor.dtype} {list(box.shape)} as "
                                 f"{MANIFEST} says")  # fmt: skip
            offsets.append(data_begin + begin)
        # Sizes do not show that a header names the same bytes twice, with other bytes never read.
        if any(start < stop for (_, stop), (start, _) in pairwise(self._ranges(file, offsets))):
            raise ValueError("its tensors overlap")
        return offsets

    def _ranges(self, file: str, offsets: Sequence[int]) -> list[tuple[int, int]]:
        sizes = (box.numel * TORCH_DTYPES[tensor.dtype].itemsize for _, tensor, _, box in self._boxes[file])
        return sorted((start, start + size) for start, size in zip(offsets, sizes, strict=True) if size)

    def _plans(self, group: Sequence[int]) -> list[list[Chunk]]:
        """The chunks of every rank in order, if the ranks of ``group`` divide the files."""
        plans: list[list[Chunk]] = [[] for _ in range(self._ranks)]
        for file, reader in readers_of(self._sizes, len(group)).items():
            offsets = self._by_rank[self._readers[file]]["offsets"][file]
            boxes = [
                (offset, self._numbers[name], TORCH_DTYPES[tensor.dtype], box)
                for offset, (name, tensor, _, box) in zip(offsets, self._boxes[file], strict=True)
                if box.numel
            ]
            plans[group[reader]] += chunks_of(file, self._sizes[file], boxes)
        return plans

    def _run_rounds(self, plans: list[list[Chunk]], needs: Sequence[Needs]) -> list[str]:
        """Read this rank's chunks, and receive parts of those of other ranks; returns the faults."""
        chunks_to_read = plans[self._rank]
        own_needs = needs[self._rank]
        hosts = [needed["host"] for needed in self._by_rank]
        is_near = [bool(host) and host == hosts[self._rank] for host in hosts]
        sends = [
            {
                rank: overlaps
                for rank, needed in enumerate(needs)
                if (rank == self._rank or not is_near[rank]) and (overlaps := list(overlaps_of(chunk, needed)))
            }
            for chunk in chunks_to_read
        ]
        arriving = defaultdict[int, list[tuple[int, Chunk, list[Overlap]]]](list)
        for rank, chunks in enumerate(plans):
            for number, chunk in enumerate(chunks if rank != self._rank else ()):
                if overlaps := list(overlaps_of(chunk, own_needs)):
                    arriving[number].append((rank, chunk, overlaps))
        # Parts that only this rank needs are read into their memory, without a copy.
        places = [
            self._places(receivers_of_chunk[self._rank]) if set(receivers_of_chunk) == {self._rank} else {}
            for receivers_of_chunk in sends
        ]
        wanted = [
            (chunk, memory)
            for chunk, memory, receivers in zip(chunks_to_read, places, sends, strict=True)
            if self._hashed or receivers
        ]
        hashes = {chunk.file: self._manifest.files[chunk.file] for chunk in chunks_to_read if self._hashed}
        faults = dict[str, str]()
        source = read_chunks(self._folder, wanted, hashes, faults)
        for number in range(max(map(len, plans), default=0)):
            receivers = sends[number] if number < len(chunks_to_read) else {}
            # A chunk that no rank needs is read only for its hash.
            data = next(source) if receivers or (self._hashed and number < len(chunks_to_read)) else None
            far = [(rank, overlaps) for rank, _, overlaps in arriving[number] if not is_near[rank]]
            exchange = self._exchange(receivers, data, far)
            # Start the messages of the first window; this rank's copies overlap with them.
            next(exchange, None)
            if data is not None:
                self._store_all(receivers.get(self._rank, ()), data, places[number])
            for _, chunk, overlaps in (arrival for arrival in arriving[number] if is_near[arrival[0]]):
                if problem := self._read_near(chunk, overlaps):
                    # The rounds continue after a fault: other ranks wait for this rank's messages.
                    faults.setdefault(chunk.file, f"{self._folder / chunk.file} cannot be read: {problem}")
            for _ in exchange:
                pass  # wait for the messages of a window, and start those of the next
        with suppress(StopIteration):
            next(source)  # compares the last hash
        return list(faults.values())

    def _exchange(
        self,
        receivers: Mapping[int, Sequence[Overlap]],
        data: Tensor | None,
        far: Sequence[tuple[int, Sequence[Overlap]]],
    ) -> Iterator[None]:
        """Exchange the messages of a round in windows: parts of ``data`` to ``receivers``, and from the ranks in
        ``far``. Yields when the messages of a window have been started."""
        sent = defaultdict[int, dict[int, Sequence[Overlap]]](dict)
        received = defaultdict[int, dict[int, Sequence[Overlap]]](dict)
        for rank, overlaps in receivers.items():
            if rank != self._rank:
                sent[window_of(self._rank, rank, self._ranks)][rank] = overlaps
        for rank, overlaps in far:
            received[window_of(rank, self._rank, self._ranks)][rank] = overlaps
        for window in sorted({*sent, *received}):
            yield from self._exchange_window(sent[window], data, received[window])

    def _exchange_window(
        self, sent: Mapping[int, Sequence[Overlap]], data: Tensor | None, received: Mapping[int, Sequence[Overlap]]
    ) -> Iterator[None]:
        messages = [
            (packed(overlaps, data).to(self._device), rank) for rank, overlaps in sent.items() if data is not None
        ]
        buffers = [
            (torch.empty(places_of(overlaps)[-1], dtype=torch.uint8, device=self._device), rank)
            for rank, overlaps in received.items()
        ]
        operations = [dist.P2POp(dist.isend, message, rank) for message, rank in messages]
        operations += [dist.P2POp(dist.irecv, buffer, rank) for buffer, rank in buffers]
        handles = dist.batch_isend_irecv(operations)
        yield
        for handle in handles:
            handle.wait()
        for buffer, rank in buffers:
            for (span, box, common), offset in zip(received[rank], places_of(received[rank]), strict=False):
                room = buffer[offset : offset + common.numel * span.dtype.itemsize]
                self._store(span, box, common, viewed(room, span.dtype, common.shape))

    def _read_near(self, chunk: Chunk, overlaps: Sequence[Overlap]) -> str:
        """Read this rank's parts of a chunk that another rank of the host reads, too; returns the error, or ""."""
        begin = min(span.offset for span, _, _ in overlaps)
        end = max(span.offset + span.box.numel * span.dtype.itemsize for span, _, _ in overlaps)
        if len(self._near) < end - begin:
            self._near = torch.empty(end - begin, dtype=torch.uint8)
        data = self._near[: end - begin]
        moved = [(replace(span, offset=span.offset - begin), box, common) for span, box, common in overlaps]
        places = self._places(moved)
        problem = _read_inside(self._folder, chunk.file, chunk.start + begin, segments_of(data, places))
        self._store_all(moved, data, places)
        return problem

    def _places(self, overlaps: Iterable[Overlap]) -> dict[int, Tensor]:
        """The memory of spans that can be read without a copy, as bytes, by offset in the chunk."""
        memory_by_offset = dict[int, Tensor]()
        for span, box, common in overlaps:
            for memory in self._memory[span.tensor, box]:
                destination = memory[common.within(box)]
                is_same = common == span.box and destination.dtype == span.dtype and destination.is_contiguous()
                if is_same and destination.device.type == "cpu":
                    memory_by_offset.setdefault(span.offset, destination.view(-1).view(torch.uint8))
        return memory_by_offset

    def _store_all(self, overlaps: Iterable[Overlap], data: Tensor, places: Mapping[int, Tensor]) -> None:
        """Copy ``overlaps`` of a chunk, which is in ``data`` and ``places``, into all memory that they are not in."""
        for span, box, common in overlaps:
            memory = places.get(span.offset)
            values = span.values(data) if memory is None else viewed(memory, span.dtype, span.box.shape)
            self._store(span, box, common, values[common.within(span.box)])

    def _store(self, span: Span, box: Box, common: Box, values: Tensor) -> None:
        for memory in self._memory[span.tensor, box]:
            destination = memory[common.within(box)]
            if destination.data_ptr() != values.data_ptr():
                destination.copy_(values)

    def _raise(self, faults: list[str]) -> None:
        if faults:
            raise DamagedCheckpoint(self._folder, "; ".join(dict.fromkeys(faults)))


def read_chunks(
    folder: Path,
    chunks: Sequence[tuple[Chunk, Mapping[int, Tensor]]],
    hashes: Mapping[str, StoredFile],
    faults: dict[str, str],
) -> Iterator[Tensor]:
    """Read ``chunks`` ahead in threads; yield the bytes of each, which are valid until the next one.

    With each chunk come its places: bytes at these offsets are read into this memory instead (see ``segments_of``).
    All bytes of the files in ``hashes`` are among the chunks, in order. ``faults`` receives a sentence for each file
    that cannot be read or whose hash differs.
    """
    size = max((chunk.stop - chunk.start for chunk, _ in chunks), default=0)
    # A buffer for each thread, one for the chunk that the caller uses, and one for a chunk that waits for it.
    free = [torch.empty(size, dtype=torch.uint8) for _ in range(min(len(chunks), THREADS + 2))]
    digests = {file: xxh3_128() for file in hashes}
    waiting = deque[tuple[Tensor, Tensor, Future[None]]]()
    left = deque(chunks)
    previous = Future[None]()
    previous.set_result(None)

    def read(chunk: Chunk, segments: Sequence[Tensor], before: Future[None]) -> None:
        problem = _read_inside(folder, chunk.file, chunk.start, segments)
        if problem:
            faults.setdefault(chunk.file, f"{folder / chunk.file} cannot be read: {problem}")
        # Chunks are read out of order but hashed in order: the hash is that of consecutive bytes.
        before.result()
        if chunk.file in digests:
            for segment in segments:
                digests[chunk.file].update(segment.numpy().data)

    with ThreadPoolExecutor(THREADS) as pool:
        while waiting or left:
            while left and free:
                chunk, places = left.popleft()
                buffer = free.pop()
                data = buffer[: chunk.stop - chunk.start]
                previous = pool.submit(read, chunk, segments_of(data, places), previous)
                waiting.append((buffer, data, previous))
            buffer, data, reading = waiting.popleft()
            reading.result()
            yield data
            free.append(buffer)
    for file, expected in hashes.items():
        if digests[file].hexdigest() != expected.hash:
            faults.setdefault(file, f"{folder / file} is damaged: its hash differs")


def segments_of(data: Tensor, places: Mapping[int, Tensor]) -> list[Tensor]:
    """The memory into which the bytes of a chunk are read, in their order: ``places``, by offset, and for all other
    bytes ``data``, which has the size of the chunk."""
    segments = list[Tensor]()
    end = 0
    for offset, memory in sorted(places.items()):
        segments += [data[end:offset], memory]
        end = offset + len(memory)
    return [segment for segment in [*segments, data[end:]] if len(segment)]


def _read_inside(folder: Path, file: str, start: int, segments: Sequence[Tensor]) -> str:
    """Read bytes of a file of ``folder`` from ``start`` on into ``segments``; returns any error, because other ranks
    wait for this one, or ""."""
    try:
        path = inside(folder, file)
        if (remote := in_storage(path)) is not None:
            return _read_object(remote, start, segments)
        with path.open("rb", buffering=0) as source:
            source.seek(start)
            for segment in segments:
                view = segment.numpy().data
                while view:
                    count = source.readinto(view)
                    if not count:
                        return "it is truncated"
                    view = view[count:]
    except FAULTS as error:
        return str(getattr(error, "strerror", None) or error)
    return ""


def _read_object(remote: ObjectPath, start: int, segments: Sequence[Tensor]) -> str:
    """As ``_read_inside``, from object storage."""
    size = sum(map(len, segments))
    offset = 0
    data = remote.read_range(start, size)
    if len(data) < size:
        return "it is truncated"
    for segment in segments:
        segment.numpy().data[:] = data[offset : offset + len(segment)]
        offset += len(segment)
    return ""
