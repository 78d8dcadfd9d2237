"""Writes checkpoints of this program from whole tensors of another one."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_core.checkpoint import Box, Save
from megatron_core.checkpoint.manifest import box_key
from megatron_core.checkpoint.writer import Entry
from megatron_core.errors import CheckpointError


def save_tensors(
    folder: Path,
    iteration: int,
    entries: Iterable[Entry],
    tensors: Iterable[Tensor],
    state: Mapping[str, Any],
    *,
    extra_files: Mapping[str, Path] | None = None,
) -> Path:
    """Write a checkpoint of whole ``tensors``, produced one at a time by this process; returns its folder.

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
        # After a success the folder has its final name, and there is nothing to delete.
        save.give_up()
    return save.final
