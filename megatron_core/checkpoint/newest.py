"""The newest checkpoint that is whole, found by all ranks together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_core.checkpoint.folder import Candidates, find_candidates, find_checkpoint, iteration_of
from megatron_core.checkpoint.reader import CheckpointReader
from megatron_core.errors import CheckpointError
from megatron_core.parallel.texts import tell_all


def open_newest(
    load: str, step: int | None, temporary: Path | None = None, *, verify: bool = True, device: torch.device
) -> CheckpointReader | None:
    """The first of ``find_candidates`` that every rank finds whole; None if the folder has none.

    All ranks of the job call this together, and each hashes a part of the files. ``temporary`` may have a checkpoint
    for a fast restart, which comes first if it is newer. What is damaged is refused; where ``load`` is the folder of
    all checkpoints, the next one takes its place, and rank 0 says so. Errors: ``CheckpointError``.
    """
    candidates = _candidates(load, step, temporary)
    if candidates.note:
        note(candidates.note)
    refused: list[str] = []
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    for folder in candidates.folders:
        reader, fault = None, ""
        try:
            reader = CheckpointReader(folder)
            fault = "; ".join(reader.verify(rank, size) if verify else ())
        except CheckpointError as error:
            fault = str(error)
        faults = list(dict.fromkeys(text for text in tell_all(fault, device) if text))
        if reader is not None and not faults:
            if refused:
                note(f"iteration {reader.manifest.iteration} IS LOADED IN ITS PLACE, from {folder}")
            return reader
        refused.append("; ".join(faults))
        if not candidates.named:
            note(f"A DAMAGED CHECKPOINT IS NOT LOADED: {refused[-1]}")
    if not refused:
        return None
    none_whole = "" if candidates.named else f"load={load!r} has no whole checkpoint: "
    raise CheckpointError(f"{none_whole}{'; '.join(refused)}; name another folder, or another iteration by --ckpt-step")


def _candidates(load: str, step: int | None, temporary: Path | None) -> Candidates:
    """Those in the folder ``load``, and first the one in ``temporary`` if it is newer."""
    found = find_candidates(load, step)
    newest = None if found.named or temporary is None else find_checkpoint(str(temporary))
    if newest is None or (found.folders and iteration_of(newest) <= iteration_of(found.folders[0])):
        return found
    return replace(found, folders=(newest, *found.folders))


def note(text: str) -> None:
    """Print ``text`` on rank 0."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"note: {text}", flush=True)
