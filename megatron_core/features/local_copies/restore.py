"""Loading from copies in host memory (``save_copies``), where each host has a part of the files.

All ranks exchange the list of files with correct hashes on their hosts. The newest checkpoint whose files all exist
somewhere is chosen. Each host creates a folder with links to its own files and receives only the boxes that its ranks
need and that it lacks; then ``CheckpointReader`` reads the folder like any other.
"""

import json
import math
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from megatron_core.checkpoint.boxes import TensorBox
from megatron_core.checkpoint.folder import complete_iterations, find_candidates, iteration_folder, iteration_of, run_of
from megatron_core.checkpoint.hashes import damage
from megatron_core.checkpoint.manifest import MANIFEST, TORCH_DTYPES, Manifest
from megatron_core.checkpoint.one_pass import read_tensor_header
from megatron_core.checkpoint.reader import CheckpointReader, note
from megatron_core.checkpoint.removal import delete_hidden
from megatron_core.checkpoint.writer import FAILURES, write_safetensors
from megatron_core.errors import CheckpointError
from megatron_core.features.local_copies.hosts import Hosts, find_hosts
from megatron_core.features.local_copies.transfer import Transfer, carry_out
from megatron_core.parallel.texts import broadcast_from_rank, gather_from_all_ranks, listed, raise_on_all_ranks

LOADING = ".loading"
WAY_OUT = "free space there, or resume from disk with --ckpt-step"
Save = tuple[int, str]
"""Iteration and id of a save."""


class CopiesReader(CheckpointReader):
    """Reads a checkpoint of which each host has a part, ``held``, the files by host; exit waits for all ranks."""

    takes_settings = False  # it is of the same run, and has no tokenizer

    def __init__(self, folder: Path, hosts: Hosts, held: Mapping[int, set[str]], device: torch.device) -> None:
        super().__init__(folder)
        self._hosts, self._held, self._device = hosts, held, device

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        if error == (None, None, None):
            raise_on_all_ranks("", self._device)
            if self._hosts.is_first:
                delete_hidden(self.folder)

    def fill_together(self, pieces: Iterable[TensorBox], device: torch.device) -> None:
        """Receive the boxes that ``pieces`` need and that this host lacks, then fill them.

        Errors: ``CheckpointError`` on all ranks if one did not receive its part.
        """
        pieces = list(pieces)
        self._fetch(pieces)
        self.fill(pieces)

    def _fetch(self, pieces: Iterable[TensorBox]) -> None:
        own, wanted = self._held[self._hosts.own], set[tuple[str, str]]()
        for piece in pieces:
            tensor = self.manifest.tensors.get(self._source(piece.name))
            for box in tensor.boxes if tensor is not None else ():
                if box.file not in own and piece.box.intersect(box.box) is not None:
                    wanted.add((box.file, box.key))
        by_rank = gather_from_all_ranks(json.dumps(sorted(wanted)), self._device)
        problem, transfers = "", list[Transfer]()
        try:
            transfers = list(self._transfers(by_rank))
        except (*FAILURES, ValueError, KeyError) as error:
            problem = f"{self.folder}: a file has a damaged header: {error}"
        raise_on_all_ranks(problem, self._device)
        try:
            carry_out(transfers, self._hosts.rank, self._device)
        except FAILURES as error:
            problem = f"rank {self._hosts.rank} did not receive its part of {self.folder}: {error}; {WAY_OUT}"
        raise_on_all_ranks(problem, self._device)
        if transfers:
            size = sum(length for transfer in transfers for _, length in transfer.spans)
            note(f"{size / 2**20:.1f} MiB were received from other hosts")

    def _transfers(self, needs: Sequence[str]) -> Iterator[Transfer]:
        """The transfers that give every host the boxes that its ranks need (``needs``); the same list on all ranks."""
        needed: dict[tuple[int, str], set[str]] = defaultdict(set)
        for rank, text in enumerate(needs):
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
    """Offset of each tensor in a safetensors file."""
    begin, header = read_tensor_header(path)
    return {key: begin + entry["data_offsets"][0] for key, entry in header.items() if key != "__metadata__"}


def open_copies(
    folder: Path, load: str, step: int | None, *, verify: bool, device: torch.device, sound: int | None = None
) -> CopiesReader | None:
    """The newest checkpoint in the memory of all hosts together, if it is newer than those on disk; else None.

    It must have all files and be of the run whose checkpoints are in ``load``. None also if a checkpoint on disk was
    asked for explicitly. ``sound``: the newest intact iteration on disk, if known (-1: none). A collective call. Rank 0
    prints a note about damaged and incomplete ones. Errors: ``CheckpointError`` on all ranks if a folder cannot be
    used.
    """
    on_disk = find_candidates(load, step)
    if on_disk.named:
        return None
    hosts = find_hosts(folder, device)
    newest = max(map(iteration_of, on_disk.folders), default=-1) if sound is None else sound
    newest, run = json.loads(broadcast_from_rank(0, json.dumps((newest, run_of(Path(load)))), device))
    saves, faults = _saves_of(folder, run, newest) if hosts.is_first else ([], [])
    for fault in filter(None, gather_from_all_ranks("; ".join(faults), device)):
        note(f"warning: skipped copies in memory: {fault}")
    by_rank = [
        {(number, save_id) for number, save_id in json.loads(text)}
        for text in gather_from_all_ranks(json.dumps(saves), device)
    ]
    for save in sorted(set().union(*by_rank), reverse=True):
        iteration, having = save[0], [host for host, saves_of_host in enumerate(by_rank) if save in saves_of_host]
        local_folder = iteration_folder(folder, iteration)
        manifest = broadcast_from_rank(
            having[0], (local_folder / MANIFEST).read_text() if hosts.rank == having[0] else "", device
        )
        files_by_host, faults = _held(local_folder if hosts.own in having else None, hosts, verify, device)
        for fault in faults:
            note(f"warning: skipped a damaged copy: {fault}")
        missing = sorted(set(json.loads(manifest)["files"]) - set().union(*files_by_host.values()))
        if missing:
            note(
                f"warning: iteration {iteration} in memory is incomplete: no host has an intact copy of "
                f"{listed(missing)}"
            )
            continue
        loading = folder / f".iter_{iteration:07d}{LOADING}"
        raise_on_all_ranks(
            _lay_out(loading, manifest, local_folder, files_by_host[hosts.own]) if hosts.is_first else "", device
        )
        note(f"loading iteration {iteration} from the memory of {len(having)} of {len(files_by_host)} hosts")
        return CopiesReader(loading, hosts, files_by_host, device)
    if newest >= 0 and sound is None:
        note(f"no newer checkpoint in memory: loading the newest in {load}")
    return None


def _saves_of(folder: Path, run: str, newest: int) -> tuple[list[Save], list[str]]:
    """The saves of ``run`` after ``newest`` in this host's folder, and reasons why others are skipped."""
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


def _held(
    local_folder: Path | None, hosts: Hosts, verify: bool, device: torch.device
) -> tuple[dict[int, set[str]], list[str]]:
    """The intact files of every host, and descriptions of damaged ones; each rank hashes a share of the files in
    ``local_folder``."""
    present, faults = set[str](), dict[str, str]()
    if local_folder is not None:
        files = {
            name: file
            for name, file in Manifest.read(local_folder / MANIFEST).files.items()
            if (local_folder / name).is_file()
        }
        ranks, present = hosts.ranks(hosts.own), set(files)
        faults = damage(local_folder, files, share=ranks.index(hosts.rank), shares=len(ranks)) if verify else {}
    files_by_host: dict[int, set[str]] = {host: set() for host in hosts.of_rank}
    damaged, sentences = defaultdict[int, set[str]](set), list[str]()
    for rank, text in enumerate(gather_from_all_ranks(json.dumps([sorted(present), faults]), device)):
        names, wrong = json.loads(text)
        files_by_host[hosts.of_rank[rank]] |= set(names)
        damaged[hosts.of_rank[rank]] |= set(wrong)
        sentences += wrong.values()
    return {host: files_by_host[host] - damaged[host] for host in files_by_host}, sentences


def _lay_out(loading: Path, manifest: str, local_folder: Path, names: set[str]) -> str:
    """Create the folder that this host loads from and remove older ones; returns the error, or ""."""
    try:
        for left in loading.parent.glob(f".iter_*{LOADING}"):
            delete_hidden(left)
        loading.mkdir()
        (loading / MANIFEST).write_text(manifest)
        for name in names:
            os.link(local_folder / name, loading / name)
    except OSError as error:
        return f"{loading} cannot be written: {error}; {WAY_OUT}"
    return ""
