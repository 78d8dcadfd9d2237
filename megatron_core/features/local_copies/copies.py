"""Checkpoints in host memory: each host stores the files of its own ranks and copies for other hosts.

Every host's folder has the manifest of the whole checkpoint.
"""

import json
import uuid
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megatron_core.checkpoint.boxes import TensorBox
from megatron_core.checkpoint.folder import complete_iterations, iteration_folder, rank_file
from megatron_core.checkpoint.hashes import HashingFile, StoredFile, sync_folder
from megatron_core.checkpoint.removal import delete_hidden, give_name, remove, remove_hidden
from megatron_core.checkpoint.writer import Agree, Save, run_on_all_ranks
from megatron_core.errors import CheckpointError
from megatron_core.features.local_copies.hosts import Hosts
from megatron_core.features.local_copies.transfer import Transfer, carry_out
from megatron_core.parallel.texts import broadcast_from_rank, gather_from_all_ranks


def save_copies(
    save: Save,
    pieces: Iterable[TensorBox],
    hosts: Hosts,
    agree: Agree,
    device: torch.device,
    *,
    jump: int | None = None,
    factor: int = 1,
) -> None:
    """Write the owned ``pieces`` of every rank to the folder ``save.folder`` of its host and of ``factor - 1`` other
    hosts.

    ``Hosts.keepers`` chooses those hosts. This is a collective call. The previous checkpoint is deleted once the new
    one is complete on all hosts. Errors: ``CheckpointError`` on all ranks.
    """
    save_id = broadcast_from_rank(0, uuid.uuid4().hex, device)
    first = hosts.is_first
    run_on_all_ranks(agree, "prepare the folder of a checkpoint", partial(save.prepare, save_id) if first else None)
    try:
        written: list[str] = []
        writing = f"write its tensors of a checkpoint to {save.folder}"
        run_on_all_ranks(agree, writing, lambda: written.append(_write(save, pieces)))
        reports = gather_from_all_ranks(written[0], device)
        files = {rank: StoredFile(**json.loads(text)["file"]) for rank, text in enumerate(reports) if '"file"' in text}
        copies = list(_copies(save.partial, files, hosts, jump, factor))
        run_on_all_ranks(agree, "send its copies of a checkpoint", lambda: carry_out(copies, hosts.rank, device))
        run_on_all_ranks(agree, "complete a checkpoint", (lambda: save.complete(reports)) if first else None)
        run_on_all_ranks(agree, "rename the folder of a checkpoint", (lambda: _rename(save)) if first else None)
    except CheckpointError:
        if first:
            save.give_up()
        raise
    if first:
        for iteration in complete_iterations(save.folder):
            if iteration != save.iteration:
                remove(iteration_folder(save.folder, iteration))
        remove_hidden(save.folder)


def _write(save: Save, pieces: Iterable[TensorBox]) -> str:
    save.write(pieces)
    return save.report.read_text()


def _copies(
    folder: Path, files: Mapping[int, StoredFile], hosts: Hosts, jump: int | None, factor: int
) -> Iterator[Transfer]:
    """Transfers of files to the hosts that keep copies. Every second host sends first, so that transfers run in
    parallel."""
    order = {host: number for number, host in enumerate(dict.fromkeys(hosts.of_rank))}
    for rank in sorted(files, key=lambda rank: (order[hosts.of_rank[rank]] % 2, rank)):
        path, file = folder / rank_file(rank), files[rank]
        for keeper in hosts.keepers(rank, jump, factor):
            yield Transfer(rank, keeper, path, [(0, file.size)], partial(_write_copy, path, file))


def _write_copy(path: Path, expected: StoredFile, parts: Iterator[Tensor]) -> None:
    with HashingFile(path) as file:
        for part in parts:
            file.write(part.numpy().data)
        if file.close() != expected:
            raise CheckpointError(f"{path} was damaged while it was sent")


def _rename(save: Save) -> None:
    before = give_name(save.partial, save.final)
    sync_folder(save.folder)
    delete_hidden(before)
