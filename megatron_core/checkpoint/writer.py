"""Writing a checkpoint: every rank its own boxes, the manifest last, and then one rename."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from megatron_core.checkpoint.boxes import Box, Piece
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


def save_tensors(
    save: Path,
    iteration: int,
    entries: Iterable[tuple[str, torch.dtype, tuple[int, ...]]],
    tensors: Iterable[Tensor],
    state: Mapping[str, Any],
    *,
    extra_files: Mapping[str, Path] | None = None,
) -> Path:
    """Write a checkpoint of whole ``tensors``, which this process makes one after the other; -> its folder.

    ``entries`` are their names, dtypes and global shapes.
    """
    entries = list(entries)
    final = iteration_folder(save, iteration)
    partial = save / f".{final.name}.incomplete"
    try:
        _make_folder(partial)
        keys = [(box_key(name, Box((0,) * len(shape), shape)), dtype, shape) for name, dtype, shape in entries]
        shapes = {"shapes": json.dumps({name: shape for name, _, shape in entries})}
        write_safetensors(partial / "rank_00000.safetensors", keys, tensors, shapes)
        _publish(save, iteration, partial, state, extra_files or {})
    except OSError as error:
        raise CheckpointError(f"{final} cannot be written: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
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
    """Write the owned pieces."""
    owned = [piece for piece in pieces if piece.owned]
    if owned:
        entries = [(box_key(piece.name, piece.box), piece.memory.dtype, piece.box.shape) for piece in owned]
        shapes = {"shapes": json.dumps({piece.name: piece.global_shape for piece in owned})}
        write_safetensors(path, entries, (piece.memory for piece in owned), shapes)


def write_safetensors(
    path: Path,
    entries: Iterable[tuple[str, torch.dtype, tuple[int, ...]]],
    tensors: Iterable[Tensor],
    metadata: Mapping[str, str],
) -> None:
    """Write ``tensors`` one after the other in the format of safetensors, whose own writer needs all of them at once.

    ``entries`` are their names, dtypes and shapes.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    for name, dtype, shape in entries:
        size = math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPES[dtype], "shape": shape, "data_offsets": (at, at + size)}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8 bytes
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            for part in _parts(tensor.detach()):
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
