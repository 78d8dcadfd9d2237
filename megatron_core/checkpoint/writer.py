"""Writing a checkpoint: every rank its own boxes, the manifest last, and then one rename.

Each rank writes ``rank_00000.safetensors`` into a temporary folder, brings it to disk, and leaves the file's hash in
``rank_00000.report``. Rank 0 puts the manifest together once all reports are there. No collective is needed between
the two, so that threads can write while the ranks train on (``BackgroundSave``).
"""

from __future__ import annotations

import json
import math
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from megatron_core.checkpoint.boxes import Box, Piece
from megatron_core.checkpoint.folder import drop_old, iteration_folder, remove, track
from megatron_core.checkpoint.hashes import HashingFile, StoredFile, sync_folder, write_file
from megatron_core.checkpoint.manifest import MANIFEST, TORCH_DTYPES, box_key, collect
from megatron_core.errors import CheckpointError

Agree = Callable[[bool], bool]
Entry = tuple[str, torch.dtype, tuple[int, ...]]
"""Name, dtype and shape of a tensor in a file."""

DTYPES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
"""What the format calls them."""
PART_BYTES = 2**24
"""Bytes that are copied and written at a time."""
POLL_SECONDS = 0.005
"""How often rank 0 looks for the reports of the others."""
ELSEWHERE = "see the message of that rank"
"""In place of a reason, on ranks without one."""
FAILURES = (OSError, SafetensorError, CheckpointError)
"""What writing may raise: damaged files are safetensors' own."""


@dataclass(frozen=True)
class Save:
    """One checkpoint that ``ranks`` ranks write together, as this rank sees it."""

    folder: Path
    """That of all checkpoints."""
    iteration: int
    state: Mapping[str, Any]
    rank: int = 0
    ranks: int = 1
    extra_files: Mapping[str, Path] = field(default_factory=dict)
    keep_last: int | None = None
    keep_every: int | None = None
    """Which checkpoints stay once this one is complete, as of ``drop_old``."""
    replaced: tuple[Path, ...] = ()
    """Checkpoints of another run, which are deleted then."""

    @property
    def final(self) -> Path:
        """Where the checkpoint is once it is complete."""
        return iteration_folder(self.folder, self.iteration)

    @property
    def partial(self) -> Path:
        """Where it is written."""
        return self.folder / f".{self.final.name}.incomplete"

    def prepare(self) -> None:
        """Make an empty temporary folder with the save's id in it; by rank 0."""
        shutil.rmtree(self.partial, ignore_errors=True)
        self.partial.mkdir(parents=True)
        write_file(self.partial / "save_id", uuid.uuid4().hex.encode())

    def write(self, pieces: Iterable[Piece]) -> None:
        """Write this rank's owned pieces, and report."""
        owned = [piece for piece in pieces if piece.owned]
        entries = [(box_key(piece.name, piece.box), piece.memory.dtype, piece.box.shape) for piece in owned]
        shapes = {piece.name: piece.global_shape for piece in owned}
        self.write_tensors(entries, (piece.memory for piece in owned), shapes)

    def write_tensors(
        self, entries: list[Entry], tensors: Iterable[Tensor], shapes: Mapping[str, tuple[int, ...]]
    ) -> None:
        """Write ``tensors``, boxes of tensors of the global ``shapes``, and report."""
        save_id = (self.partial / "save_id").read_text()
        path = self.partial / f"rank_{self.rank:05d}.safetensors"
        files: dict[str, StoredFile] = {}
        try:
            if entries:
                metadata = {"shapes": json.dumps(shapes), "save_id": save_id, "iteration": str(self.iteration)}
                files[path.name] = write_safetensors(path, entries, tensors, metadata)
            self._report(files)
        except FAILURES as error:
            path.unlink(missing_ok=True)  # on a full disk the report needs its room
            with suppress(OSError):
                self._report({}, str(error))
            raise

    def _report(self, files: Mapping[str, StoredFile], error: str = "") -> None:
        report = {"files": {name: asdict(file) for name, file in files.items()}, "error": error}
        hidden, path = (self.partial / f"rank_{self.rank:05d}.{kind}" for kind in ("unreported", "report"))
        write_file(hidden, json.dumps(report).encode())
        hidden.rename(path)

    def wait_for_reports(self, seconds: float) -> None:
        """Wait until every rank has reported; an error after ``seconds`` in which none did."""
        deadline, known = time.monotonic() + seconds, -1
        while (found := len(list(self.partial.glob("*.report")))) < self.ranks:
            if found > known:
                deadline, known = time.monotonic() + seconds, found
            if time.monotonic() > deadline:
                raise CheckpointError(f"{self.ranks - found} of {self.ranks} ranks did not write within {seconds:g} s")
            time.sleep(POLL_SECONDS)

    def publish(self) -> None:
        """Complete the checkpoint from the reports: manifest, final name, tracker; by rank 0."""
        files: dict[str, StoredFile] = {}
        for path in sorted(self.partial.glob("*.report")):
            report = json.loads(path.read_text())
            if report["error"]:
                raise CheckpointError(f"{path.stem}: {report['error']}")
            files |= {name: StoredFile(**entry) for name, entry in report["files"].items()}
            path.unlink()
        for name, source in self.extra_files.items():
            (self.partial / name).parent.mkdir(parents=True, exist_ok=True)
            files[name] = write_file(self.partial / name, source.read_bytes())
            sync_folder((self.partial / name).parent)
        save_id = self.partial / "save_id"
        manifest = collect(self.partial, self.iteration, save_id.read_text(), self.state, files)
        save_id.unlink()
        manifest.write(self.partial / MANIFEST)
        sync_folder(self.partial)
        remove(self.final)
        self.partial.rename(self.final)
        track(self.folder, self.iteration)
        for other in self.replaced:
            if other != self.final:
                remove(other)
        drop_old(self.folder, self.iteration, keep_last=self.keep_last, keep_every=self.keep_every)

    def give_up(self) -> None:
        """Free the room of what was written; by rank 0."""
        shutil.rmtree(self.partial, ignore_errors=True)


def save_checkpoint(save: Save, pieces: Iterable[Piece], agree: Agree) -> Path:
    """Write the owned ``pieces`` of every rank and return the checkpoint's folder.

    ``agree`` tells all ranks whether all of them succeeded; it is where they wait for each other. Nothing under the
    final name is ever incomplete: a temporary folder is renamed once it is complete, then the tracker names it.
    """
    leader = save.rank == 0
    _together(agree, "prepare the folder", save.prepare if leader else None)
    try:
        _together(agree, "write its tensors", lambda: save.write(pieces))
        _together(agree, "complete", save.publish if leader else None)
    except CheckpointError:
        if leader:
            save.give_up()
        raise
    return save.final


class BackgroundSave:
    """A checkpoint that a thread writes while the ranks go on; ``pieces`` must be a snapshot.

    ``seconds`` is how long rank 0 waits for another rank's report. Made on all ranks together, and so is ``finish``.
    """

    def __init__(self, save: Save, pieces: list[Piece], agree: Agree, seconds: float) -> None:
        self._save, self._agree, self._problem = save, agree, ""
        _together(agree, "prepare the folder", save.prepare if save.rank == 0 else None)
        self._thread = Thread(target=self._run, args=(pieces, seconds), name="checkpoint", daemon=True)
        self._thread.start()

    def _run(self, pieces: list[Piece], seconds: float) -> None:
        try:
            self._save.write(pieces)
            if self._save.rank == 0:
                self._save.wait_for_reports(seconds)
                self._save.publish()
        except FAILURES as error:
            self._problem = str(error) or type(error).__name__
            if self._save.rank == 0:
                self._save.give_up()

    def join(self, seconds: float | None = None) -> None:
        """Wait for this rank's thread."""
        self._thread.join(seconds)

    def finish(self) -> Path:
        """Wait until the checkpoint is complete; -> its folder. Errors: ``CheckpointError`` on all ranks."""
        self.join()

        def tell() -> None:
            if self._problem:
                raise CheckpointError(self._problem)

        _together(self._agree, "write its part", tell)
        return self._save.final


class Snapshot:
    """Copies of pieces in the host's memory, in one buffer that the next copy uses again."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    @torch.no_grad()
    def take(self, pieces: Iterable[Piece]) -> list[Piece]:
        """The owned ``pieces`` with memory of their own."""
        owned = [piece for piece in pieces if piece.owned]
        offsets, total = [], 0
        for piece in owned:
            offsets.append(total)
            total += -(-piece.memory.nbytes // 64) * 64
        on_gpu = any(piece.memory.is_cuda for piece in owned)
        if self._buffer.numel() < total:
            self._buffer = torch.empty(total, dtype=torch.uint8, pin_memory=on_gpu)
        copies = []
        for piece, at in zip(owned, offsets, strict=True):
            source = piece.memory
            copy = self._buffer[at : at + source.nbytes].view(source.dtype).view(source.shape)
            copies.append(replace(piece, memory=copy.copy_(source, non_blocking=on_gpu)))
        if on_gpu:
            torch.cuda.synchronize()
        return copies


def save_tensors(
    folder: Path,
    iteration: int,
    entries: Iterable[Entry],
    tensors: Iterable[Tensor],
    state: Mapping[str, Any],
    *,
    extra_files: Mapping[str, Path] | None = None,
) -> Path:
    """Write a checkpoint of whole ``tensors``, which this process makes one after the other; -> its folder.

    ``entries`` are their names, dtypes and global shapes.
    """
    entries = list(entries)
    save = Save(folder, iteration, state, extra_files=extra_files or {})
    keys = [(box_key(name, Box((0,) * len(shape), shape)), dtype, shape) for name, dtype, shape in entries]
    try:
        save.prepare()
        save.write_tensors(keys, tensors, {name: shape for name, _, shape in entries})
        save.publish()
    except OSError as error:
        raise CheckpointError(f"{save.final} cannot be written: {error}") from error
    finally:
        save.give_up()
    return save.final


def _together(agree: Agree, what: str, action: Callable[[], None] | None) -> None:
    """Run ``action`` on this rank; if it fails anywhere, it is an error on every rank instead of a hang."""
    problem: Exception | None = None
    try:
        if action is not None:
            action()
    except FAILURES as error:
        problem = error
    if not agree(problem is None):
        raise CheckpointError(f"a rank could not {what} of a checkpoint: {problem or ELSEWHERE}")


def write_safetensors(
    path: Path, entries: Iterable[Entry], tensors: Iterable[Tensor], metadata: Mapping[str, str]
) -> StoredFile:
    """Write ``tensors`` one after the other in the format of safetensors, whose own writer needs all of them at once.

    ``entries`` are their names, dtypes and shapes. -> the size and hash of the file, which is on disk then.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    for name, dtype, shape in entries:
        size = math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPES[dtype], "shape": shape, "data_offsets": (at, at + size)}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8 bytes
    with HashingFile(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            for part in _parts(tensor.detach()):
                file.write(part.contiguous().cpu().view(-1).view(torch.uint8).numpy().data)
        return file.close()


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """``tensor`` in row-major order, in parts that a copy of each takes little memory."""
    rows = tensor.view(1) if tensor.dim() == 0 else tensor
    return rows.split(max(PART_BYTES * len(rows) // max(rows.nbytes, 1), 1))
