"""Writing a checkpoint: every rank its own boxes, the manifest last, and then one rename."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from megatron_core.checkpoint.boxes import Piece
from megatron_core.checkpoint.manifest import MANIFEST, TRACKER, box_key, collect, iteration_folder
from megatron_core.errors import CheckpointError

Agree = Callable[[bool], bool]

DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
"""What the format calls them."""
PART_BYTES = 2**24
"""Bytes that are copied and written at a time."""


def save_checkpoint(
    save: Path,
    iteration: int,
    pieces: Iterable[Piece],
    state: Mapping[str, Any],
    *,
    rank: int,
    agree: Agree,
    extra_files: Mapping[str, Path] | None = None,
) -> Path:
    """Write the owned ``pieces`` of every rank and return the checkpoint's folder.

    ``agree`` tells all ranks whether all of them succeeded; it is where they wait for each other. Nothing under the
    final name is ever incomplete: a temporary folder is renamed once it is complete, then the tracker names it.
    """
    final = iteration_folder(save, iteration)
    partial = save / f".{final.name}.incomplete"
    leader = rank == 0
    _together(agree, "prepare the folder", lambda: _make_folder(partial) if leader else None)
    _together(agree, "write its tensors", lambda: _write_pieces(partial / f"rank_{rank:05d}.safetensors", pieces))
    _together(
        agree,
        "complete",
        lambda: _publish(save, iteration, partial, state, extra_files or {}) if leader else None,
    )
    return final


def _together(agree: Agree, what: str, action: Callable[[], None]) -> None:
    """Run ``action`` on this rank; if it fails anywhere, it is an error on every rank instead of a hang."""
    problem: Exception | None = None
    try:
        action()
    except (OSError, SafetensorError, CheckpointError) as error:  # damaged files are safetensors' own
        problem = error
    if not agree(problem is None):
        raise CheckpointError(f"a rank could not {what} of a checkpoint: {problem or 'see the message of that rank'}")


def _make_folder(partial: Path) -> None:
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)


def _write_pieces(path: Path, pieces: Iterable[Piece]) -> None:
    """Write the owned pieces in the format of safetensors, whose own writer copies all tensors first."""
    owned = [piece for piece in pieces if piece.owned]
    if not owned:
        return
    header: dict[str, Any] = {"__metadata__": {"shapes": json.dumps({p.name: p.global_shape for p in owned})}}
    at = 0
    for piece in owned:
        entry = {"dtype": DTYPES[piece.memory.dtype], "shape": piece.box.shape}
        header[box_key(piece.name, piece.box)] = entry | {"data_offsets": (at, at + piece.memory.nbytes)}
        at += piece.memory.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8 bytes
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for piece in owned:
            for part in _parts(piece.memory.detach()):
                file.write(part.contiguous().cpu().view(-1).view(torch.uint8).numpy().data)


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """``tensor`` in row-major order, in parts that a copy of each takes little memory."""
    rows = tensor.view(1) if tensor.dim() == 0 else tensor
    return rows.split(max(PART_BYTES * len(rows) // max(rows.nbytes, 1), 1))


def _publish(
    save: Path, iteration: int, partial: Path, state: Mapping[str, Any], extra_files: Mapping[str, Path]
) -> None:
    for name, source in extra_files.items():
        (partial / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, partial / name)
    collect(partial, state).write(partial / MANIFEST)
    final = iteration_folder(save, iteration)
    replaced = save / f".{final.name}.replaced"
    shutil.rmtree(replaced, ignore_errors=True)
    if final.exists():  # out of sight whole: deleting takes time, and a half deleted folder still has its manifest
        final.rename(replaced)
    partial.rename(final)
    tracker = save / f".{TRACKER}"
    tracker.write_text(str(iteration))
    os.replace(tracker, save / TRACKER)
    shutil.rmtree(replaced, ignore_errors=True)
