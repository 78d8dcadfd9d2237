"""Writing a checkpoint: every rank its own boxes, the manifest last, and then one rename."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file

from megatron_core.checkpoint.boxes import Piece
from megatron_core.checkpoint.manifest import MANIFEST, TRACKER, box_key, collect, iteration_folder
from megatron_core.errors import CheckpointError

Agree = Callable[[bool], bool]


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
    final name is ever incomplete: a folder aside is renamed when it is whole, and only then the tracker names it.
    """
    final = iteration_folder(save, iteration)
    aside = save / f".{final.name}.incomplete"
    leader = rank == 0
    _together(agree, "prepare the folder", lambda: _make_folder(aside) if leader else None)
    _together(agree, "write its tensors", lambda: _write_pieces(aside / f"rank_{rank:05d}.safetensors", pieces))
    _together(
        agree,
        "complete",
        lambda: _publish(save, iteration, aside, state, extra_files or {}) if leader else None,
    )
    return final


def _together(agree: Agree, what: str, action: Callable[[], None]) -> None:
    """Run ``action`` on this rank; if it fails anywhere, it is an error on every rank instead of a hang."""
    problem: Exception | None = None
    try:
        action()
    except (OSError, SafetensorError, CheckpointError) as error:  # a full disk is one of safetensors' own
        problem = error
    if not agree(problem is None):
        raise CheckpointError(f"a rank could not {what} of a checkpoint: {problem or 'see the message of that rank'}")


def _make_folder(aside: Path) -> None:
    if aside.exists():
        shutil.rmtree(aside)
    aside.mkdir(parents=True)


def _write_pieces(path: Path, pieces: Iterable[Piece]) -> None:
    owned = [piece for piece in pieces if piece.owned]
    if not owned:
        return
    tensors = {box_key(p.name, p.box): p.memory.detach().contiguous().cpu().clone() for p in owned}
    shapes = {p.name: p.global_shape for p in owned}
    save_file(tensors, path, metadata={"shapes": json.dumps(shapes)})


def _publish(
    save: Path, iteration: int, aside: Path, state: Mapping[str, Any], extra_files: Mapping[str, Path]
) -> None:
    for name, source in extra_files.items():
        (aside / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, aside / name)
    collect(aside, state).write(aside / MANIFEST)
    final = iteration_folder(save, iteration)
    replaced = save / f".{final.name}.replaced"
    shutil.rmtree(replaced, ignore_errors=True)
    if final.exists():  # out of sight whole: deleting takes time, and a half deleted folder still has its manifest
        final.rename(replaced)
    aside.rename(final)
    tracker = save / f".{TRACKER}"
    tracker.write_text(str(iteration))
    os.replace(tracker, save / TRACKER)
    shutil.rmtree(replaced, ignore_errors=True)
