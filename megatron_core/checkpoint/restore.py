"""Loading from copies in the memory of the hosts (``save_copies``), of which each host has a part.

All ranks tell each other which files of which save their host holds with the right hashes. The newest checkpoint of
which all files are somewhere is taken. Each host makes a folder of it, with its own files as links, and is sent the
boxes that its ranks need and that it does not hold, no others; then ``CheckpointReader`` reads it as any other.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from megatron_core.checkpoint.boxes import TensorBox
from megatron_core.checkpoint.folder import (
    complete_iterations,
    delete,
    find_candidates,
    iteration_folder,
    iteration_of,
    run_of,
)
from megatron_core.checkpoint.hashes import damage
from megatron_core.checkpoint.hosts import Hosts, fail_together, meet
from megatron_core.checkpoint.manifest import MANIFEST, TORCH_DTYPES, Manifest
from megatron_core.checkpoint.reader import CheckpointReader, note
from megatron_core.checkpoint.transfer import Transfer, carry_out
from megatron_core.checkpoint.writer import FAILURES, write_safetensors
from megatron_core.errors import CheckpointError
from megatron_core.parallel.texts import listed, tell_all, tell_from

LOADING = ".loading"
WAY_OUT = "make room there, or resume from disk with --ckpt-step"
Save = tuple[int, str]
"""Iteration and id of a save."""


class CopiesReader(CheckpointReader):
    """A checkpoint of which each host has a part: ``fetch`` has to come before ``fill``, and leaving waits for all
    ranks. ``held`` are the files of each host."""

    def __init__(self, folder: Path, hosts: Hosts, held: Mapping[int, set[str]], device: torch.device) -> None:
        super().__init__(folder)
        self._hosts, self._held, self._device = hosts, held, device

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        if error == (None, None, None):
            fail_together("", self._device)
            if self._hosts.is_first:
                shutil.rmtree(self.folder, ignore_errors=True)

    def fetch(self, pieces: Iterable[TensorBox]) -> None:
        """Let this host be sent the boxes that ``pieces`` need and that it does not hold. All ranks call this together.

        Errors: ``CheckpointError`` on all ranks.
        """
        own, wanted = self._held[self._hosts.own], set[tuple[str, str]]()
        for piece in pieces:
            tensor = self.manifest.tensors.get(self._source(piece.name))
            for box in tensor.boxes if tensor is not None else ():
                if box.file not in own and piece.box.intersect(box.box) is not None:
                    wanted.add((box.file, box.key))
        told = tell_all(json.dumps(sorted(wanted)), self._device)
        problem, transfers = "", list[Transfer]()
        try:
            transfers = list(self._transfers(told))
        except (*FAILURES, ValueError, KeyError) as error:
            problem = f"{self.folder}: a file has no sound header: {error}"
        fail_together(problem, self._device)
        try:
            carry_out(transfers, self._hosts.rank, self._device)
        except FAILURES as error:
            problem = f"what rank {self._hosts.rank} needs of {self.folder} did not come: {error}; {WAY_OUT}"
        fail_together(problem, self._device)
        if transfers:
            size = sum(length for transfer in transfers for _, length in transfer.spans)
            note(f"{size / 2**20:.1f} MiB were sent from the memory of other hosts")

    def _transfers(self, told: Sequence[str]) -> Iterator[Transfer]:
        """What has to be sent so that every host has the boxes that its ranks have ``told``, the same on all ranks."""
        needed: dict[tuple[int, str], set[str]] = defaultdict(set)
        for rank, text in enumerate(told):
            for file, key in json.loads(text):
                needed[self._hosts.of_rank[rank], file].add(key)
        boxes = {
            (box.file, box.key): (box.key, TORCH_DTYPES[tensor.dtype], box.box.shape)
            for tensor in self.manifest.tensors.values()
            for box in tensor.boxes
        }
        metadata = {"save_id": self.manifest.save_id, "iteration": str(self.manifest.iteration)}
        for number, ((host, file), keys) in enumerate(sorted(needed.items())):
            entries = [boxes[file, key] for key in sorted(keys)]
            holders = [rank for rank, other in enumerate(self._hosts.of_rank) if file in self._held[other]]
            targets = self._hosts.ranks(host)
            source, path = holders[number % len(holders)], self.folder / file
            starts = _starts(path) if source == self._hosts.rank else defaultdict(int)
            spans = [(starts[key], dtype.itemsize * math.prod(shape)) for key, dtype, shape in entries]
            write = partial(write_safetensors, path, entries, metadata=metadata)
            yield Transfer(source, targets[number % len(targets)], path, spans, write)


def _starts(path: Path) -> dict[str, int]:
    """Where each tensor of a safetensors file begins."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    return {key: 8 + length + entry["data_offsets"][0] for key, entry in header.items() if key != "__metadata__"}


def open_copies(
    folder: Path, load: str, step: int | None, *, verify: bool, device: torch.device, sound: int | None = None
) -> CopiesReader | None:
    """The newest checkpoint of which the folders ``folder`` of all hosts together hold all files, of the run whose
    checkpoints are in ``load``; None if none is newer than those, or one of those is asked for. ``sound`` is the newest
    of those that is whole (-1: none), where that is known. All ranks call this together.

    What is damaged or not complete is told. Errors: ``CheckpointError`` on all ranks if a folder cannot be used.
    """
    on_disk = find_candidates(load, step)
    if on_disk.named:
        return None
    hosts = meet(folder, device)
    newest = max(map(iteration_of, on_disk.folders), default=-1) if sound is None else sound
    newest, run = json.loads(tell_from(0, json.dumps((newest, run_of(Path(load)))), device))
    saves, faults = _saves_of(folder, run, newest) if hosts.is_first else ([], [])
    for fault in filter(None, tell_all("; ".join(faults), device)):
        note(f"COPIES IN MEMORY ARE NOT LOADED: {fault}")
    told = [{(number, save_id) for number, save_id in json.loads(text)} for text in tell_all(json.dumps(saves), device)]
    for save in sorted(set().union(*told), reverse=True):
        iteration, having = save[0], [host for host, found in enumerate(told) if save in found]
        own = iteration_folder(folder, iteration)
        manifest = tell_from(having[0], (own / MANIFEST).read_text() if hosts.rank == having[0] else "", device)
        held, faults = _held(own if hosts.own in having else None, hosts, verify, device)
        for fault in faults:
            note(f"A DAMAGED COPY IS NOT LOADED: {fault}")
        missing = sorted(set(json.loads(manifest)["files"]) - set().union(*held.values()))
        if missing:
            note(f"ITERATION {iteration} IN MEMORY IS NOT COMPLETE: no host has a sound copy of {listed(missing)}")
            continue
        loading = folder / f".iter_{iteration:07d}{LOADING}"
        fail_together(_lay_out(loading, manifest, own, held[hosts.own]) if hosts.is_first else "", device)
        note(f"iteration {iteration} IS LOADED FROM MEMORY, of {len(having)} of {len(held)} hosts")
        return CopiesReader(loading, hosts, held, device)
    if newest >= 0 and sound is None:
        note(f"the hosts have nothing newer in memory: the newest checkpoint in {load} is loaded")
    return None


def _saves_of(folder: Path, run: str, newest: int) -> tuple[list[Save], list[str]]:
    """The saves of ``run`` after ``newest`` in this host's folder; and why others are not taken."""
    saves, faults = list[Save](), []
    for iteration in complete_iterations(folder):
        path = iteration_folder(folder, iteration) / MANIFEST
        try:
            manifest = Manifest.read(path)
        except CheckpointError as error:
            faults.append(str(error))
            continue
        if not run or manifest.state.get("run") != run:
            faults.append(f"{path.parent} is of another run")
        elif iteration > newest:
            saves.append((iteration, manifest.save_id))
    return saves, faults


def _held(own: Path | None, hosts: Hosts, verify: bool, device: torch.device) -> tuple[dict[int, set[str]], list[str]]:
    """The sound files of every host, of which each rank hashes a share of those in ``own``; and what is wrong."""
    present, faults = set[str](), dict[str, str]()
    if own is not None:
        files = {name: file for name, file in Manifest.read(own / MANIFEST).files.items() if (own / name).is_file()}
        ranks, present = hosts.ranks(hosts.own), set(files)
        faults = damage(own, files, share=ranks.index(hosts.rank), shares=len(ranks)) if verify else {}
    held: dict[int, set[str]] = {host: set() for host in hosts.of_rank}
    damaged, sentences = defaultdict[int, set[str]](set), list[str]()
    for rank, text in enumerate(tell_all(json.dumps([sorted(present), faults]), device)):
        found, wrong = json.loads(text)
        held[hosts.of_rank[rank]] |= set(found)
        damaged[hosts.of_rank[rank]] |= set(wrong)
        sentences += wrong.values()
    return {host: held[host] - damaged[host] for host in held}, sentences


def _lay_out(loading: Path, manifest: str, own: Path, held: set[str]) -> str:
    """Make the folder that this host loads from, without what others have left; -> what prevents that."""
    try:
        for left in loading.parent.glob(f".iter_*{LOADING}"):
            delete(left)
        loading.mkdir()
        (loading / MANIFEST).write_text(manifest)
        for name in held:
            os.link(own / name, loading / name)
    except OSError as error:
        return f"{loading} cannot be written: {error}; {WAY_OUT}"
    return ""
