"""Writes a checkpoint: every rank its own boxes, then the manifest, then one rename.

Each rank writes ``rank_00000.safetensors`` into a temporary folder, flushes it to disk, and stores the file's hash in
``rank_00000.report``. Rank 0 writes the manifest once all reports exist. No collective is needed in between, so that
threads can write while training continues (``features.background_saves``).
"""

import errno
import json
import math
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from megatron_core.checkpoint.boxes import TensorBox
from megatron_core.checkpoint.folder import iteration_folder, rank_file, refuse_foreign, track
from megatron_core.checkpoint.hashes import HashingFile, StoredFile, sync_folder, write_file
from megatron_core.checkpoint.manifest import MANIFEST, TORCH_DTYPES, box_key, collect
from megatron_core.checkpoint.removal import delete_hidden, drop_old, give_name, remove
from megatron_core.errors import CheckpointError
from megatron_core.locations import in_storage
from megatron_core.output_file import make_folder
from megatron_core.parallel.texts import listed

Agree = Callable[[bool], bool]
Entry = tuple[str, torch.dtype, tuple[int, ...]]
"""Name, dtype and shape of a tensor in a file."""

DTYPES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
"""Names of dtypes in the safetensors format."""
PART_BYTES = 2**24
"""Bytes copied and written at a time."""
POLL_SECONDS, REMOTE_POLL_SECONDS = 0.005, 0.5
"""Seconds between rank 0's checks for reports of other ranks, in a folder and in object storage."""
ELSEWHERE = "see the message of that rank"
"""Placeholder for a reason on ranks that do not know it."""
FAILURES = (OSError, SafetensorError, CheckpointError)
"""Errors that writing may raise; safetensors has its own for damaged files."""


@dataclass(frozen=True)
class Save:
    """One checkpoint that ``ranks`` ranks write together, as seen by this rank."""

    folder: Path
    """The folder of all checkpoints."""
    iteration: int
    state: Mapping[str, Any]
    rank: int = 0
    ranks: int = 1
    extra_files: Mapping[str, Path] = field(default_factory=dict)
    keep_last: int | None = None
    keep_every: int | None = None
    """Which checkpoints to keep once this one is complete, as for ``drop_old``."""
    replaced: tuple[Path, ...] = ()
    """Checkpoints of another run, deleted once this one is complete."""

    @property
    def final(self) -> Path:
        """The folder of the complete checkpoint."""
        return iteration_folder(self.folder, self.iteration)

    @property
    def partial(self) -> Path:
        """The temporary folder."""
        return self.folder / f".{self.final.name}.incomplete"

    @property
    def contents(self) -> Path:
        """The folder into which tensors are written: the temporary one, or the final one of object storage, which has
        no rename and where the manifest, written last, completes the checkpoint."""
        return self.partial if in_storage(self.folder) is None else self.final

    def prepare(self, save_id: str = "") -> None:
        """On rank 0, create an empty temporary folder with the save's id, by default a new one."""
        refuse_foreign(str(self.folder), self.folder, self.iteration)
        delete_hidden(self.partial)
        if in_storage(self.folder) is None:
            make_folder(self.folder)
            self.partial.mkdir(parents=True)
        else:
            remove(self.final)
        (self.partial / "save_id").write_text(save_id or uuid.uuid4().hex)

    def write(self, pieces: Iterable[TensorBox]) -> None:
        """Write this rank's owned pieces and its report."""
        owned = [piece for piece in pieces if piece.owned]
        entries = [(box_key(piece.name, piece.box), piece.memory.dtype, piece.box.shape) for piece in owned]
        shapes = {piece.name: piece.global_shape for piece in owned}
        self.write_tensors(entries, (piece.memory for piece in owned), shapes)

    def write_tensors(
        self, entries: list[Entry], tensors: Iterable[Tensor], shapes: Mapping[str, tuple[int, ...]]
    ) -> None:
        """Write ``tensors``, boxes of tensors of the global ``shapes``, and the report."""
        save_id = (self.partial / "save_id").read_text()
        path = self.contents / rank_file(self.rank)
        boxes = [(key, DTYPES[dtype], shape) for key, dtype, shape in entries]
        report: dict[str, Any] = {"name": path.name, "shapes": shapes, "boxes": boxes, "error": ""}
        if entries:
            metadata = {"shapes": json.dumps(shapes), "save_id": save_id, "iteration": str(self.iteration)}
            report["file"] = asdict(write_safetensors(path, entries, tensors, metadata))
        self._report(report)

    def fail(self, error: str) -> None:
        """Report to rank 0 that this rank's part failed."""
        with suppress(OSError):
            # Free space for the report if the disk is full.
            (self.contents / rank_file(self.rank)).unlink(missing_ok=True)
            self._report({"name": rank_file(self.rank), "error": error})

    @property
    def report(self) -> Path:
        """The file with this rank's report."""
        return (self.partial / rank_file(self.rank)).with_suffix(".report")

    def _report(self, report: Mapping[str, Any]) -> None:
        text = json.dumps(report)
        if in_storage(self.folder) is not None:
            self.report.write_text(text)
            return
        # Rank 0 counts files of this name, so a report appears complete, by a rename.
        hidden = self.report.with_suffix(".unreported")
        write_file(hidden, text.encode())
        hidden.rename(self.report)

    def wait_for_reports(self, seconds: float) -> None:
        """Wait until every rank has reported; an error after ``seconds`` without a new report."""
        deadline = time.monotonic() + seconds
        known = -1
        pause = POLL_SECONDS if in_storage(self.folder) is None else REMOTE_POLL_SECONDS
        while (count := len(list(self.partial.glob("*.report")))) < self.ranks:
            if count > known:
                # The limit is one for progress: a large job may write for longer than any fixed limit.
                deadline = time.monotonic() + seconds
                known = count
            if time.monotonic() > deadline:
                raise CheckpointError(f"{self.ranks - count} of {self.ranks} ranks did not write within {seconds:g} s")
            time.sleep(pause)

    def publish(self) -> None:
        """On rank 0, complete the checkpoint from the reports: manifest, final name, tracker."""
        # By their names: a listing of some object storage may be old.
        reports = ((self.partial / rank_file(rank)).with_suffix(".report") for rank in range(self.ranks))
        self.complete([report.read_text() for report in reports])
        # The order protects the previous checkpoint: the new one has its final name before the tracker names it, and
        # both before anything is deleted. A crash in between leaves a complete checkpoint that the tracker names.
        before = self._give_name()
        track(self.folder, self.iteration)
        delete_hidden(before)
        for other in self.replaced:
            if other != self.final:
                remove(other)
        drop_old(self.folder, self.iteration, keep_last=self.keep_last, keep_every=self.keep_every)

    def _give_name(self) -> Path:
        """Give the complete folder its final name; returns the folder to discard: the one that it replaces, or in
        object storage, where the manifest has completed it, that of the reports."""
        if in_storage(self.folder) is not None:
            return self.partial
        return give_name(self.partial, self.final)

    def complete(self, texts: Iterable[str]) -> None:
        """Write the manifest from the ``texts`` of all ranks' reports, and the files that belong to no rank."""
        files: dict[str, StoredFile] = {}
        reports = [json.loads(text) for text in texts]
        reported = sorted(report["name"] for report in reports)
        if reported != [rank_file(rank) for rank in range(self.ranks)]:
            raise CheckpointError(
                f"{self.ranks} ranks must report once each, and there are reports of {listed(reported)}"
            )
        for report in reports:
            if report["error"]:
                raise CheckpointError(f"{report['name']}: {report['error']}")
            if "file" in report:
                files[report["name"]] = StoredFile(**report["file"])
        # The temporary folder becomes the checkpoint: only files of the manifest may be in it.
        for path in self.partial.glob("*.report"):
            path.unlink()
        for name, source in self.extra_files.items():
            (self.contents / name).parent.mkdir(parents=True, exist_ok=True)
            files[name] = write_file(self.contents / name, source.read_bytes())
            sync_folder((self.contents / name).parent)
        save_id = self.partial / "save_id"
        manifest = collect(self.contents, self.iteration, save_id.read_text(), self.state, reports, files)
        save_id.unlink()
        manifest.write(self.contents / MANIFEST)
        # Before the rename: a name must not reach the disk before the files behind it.
        sync_folder(self.contents)

    def give_up(self) -> None:
        """On rank 0, delete the incomplete checkpoint; if the storage fails, the next save of the iteration does."""
        with suppress(OSError):
            delete_hidden(self.partial)
            if in_storage(self.folder) is not None and not (self.final / MANIFEST).is_file():
                delete_hidden(self.final)


def save_checkpoint(save: Save, pieces: Iterable[TensorBox], agree: Agree) -> Path:
    """Write the owned ``pieces`` of every rank; returns the checkpoint's folder.

    ``agree`` tells all ranks whether all of them succeeded, and synchronizes them. Nothing under the final name is ever
    incomplete: the temporary folder is renamed once it is complete, then the tracker file is updated.
    """
    leader = save.rank == 0
    run_on_all_ranks(agree, "prepare the folder of a checkpoint", save.prepare if leader else None)
    try:
        run_on_all_ranks(agree, f"write its tensors of a checkpoint to {save.folder}", lambda: save.write(pieces))
        run_on_all_ranks(agree, "complete a checkpoint", save.publish if leader else None)
    except CheckpointError:
        if leader:
            save.give_up()
        raise
    return save.final


def run_on_all_ranks(agree: Agree, what: str, action: Callable[[], None] | None) -> None:
    """Run ``action`` on this rank; if it fails on any rank, raise an error on all of them instead of hanging."""
    problem: Exception | None = None
    try:
        if action is not None:
            action()
    except FAILURES as error:
        problem = error
    if not agree(problem is None):
        raise CheckpointError(f"a rank could not {what}: {with_fix(problem) if problem else ELSEWHERE}")


def with_fix(problem: Exception) -> str:
    """The text of an error; for a full disk with the fix."""
    is_full = isinstance(problem, OSError) and problem.errno in (errno.ENOSPC, errno.EDQUOT)
    return f"{problem}; free space there, or store fewer checkpoints with --keep-last" if is_full else str(problem)


def write_safetensors(
    path: Path, entries: Iterable[Entry], tensors: Iterable[Tensor], metadata: Mapping[str, str]
) -> StoredFile:
    """Write ``tensors`` one at a time in the safetensors format; safetensors' own writer needs all of them at once.

    ``entries`` are their names, dtypes and shapes. Returns the size and hash of the file, which is on disk.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, dtype, shape in entries:
        size = math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPES[dtype], "shape": shape, "data_offsets": (offset, offset + size)}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors start at multiples of 8 bytes
    with HashingFile(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            for rows in _parts(tensor.detach()):
                file.write(rows.contiguous().cpu().view(-1).view(torch.uint8).numpy().data)
        return file.close()


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """``tensor`` in row-major order, in parts small enough to copy."""
    rows = tensor.view(1) if tensor.dim() == 0 else tensor
    return rows.split(max(PART_BYTES * len(rows) // max(rows.nbytes, 1), 1))
