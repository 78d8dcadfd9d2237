"""The methods of an open state, from which a run starts or continues."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from typing_extensions import Self

from megatron_core.checkpoint.boxes import TensorBox


class StateReader:
    """An open checkpoint, folder of another program, or copy in memory; a context manager."""

    only_weights = False
    """Whether there are neither counters nor optimizer state, so that a run starts at iteration 0."""
    continues = False
    """Whether it is the state of this job itself: all is loaded whatever the settings say, and no name can be wrong."""
    takes_settings = True
    """Whether the run may take settings and files, such as a tokenizer, that are stored in its folder."""
    folder: Path
    state: Mapping[str, Any]
    """Counters and settings as in a manifest; with ``only_weights``, ``vocab_size`` and the ``config`` of the model."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Close the files."""

    @property
    def kinds(self) -> list[str]:
        """The stored kinds of optimizer state."""
        return []

    @property
    def fault_of_state(self) -> str:
        """Why no optimizer state is found although it is stored; else empty."""
        return ""

    def has(self, name: str, shape: tuple[int, ...] | None = None) -> bool:
        """Whether a tensor of that name, and of ``shape`` if given, is stored."""
        raise NotImplementedError

    def dtype_of(self, name: str) -> torch.dtype:
        """The dtype of a stored weight."""
        raise NotImplementedError

    def fill(self, pieces: Iterable[TensorBox]) -> None:
        """Copy the stored values into the memory of each box; dtypes are converted."""
        raise NotImplementedError

    def fill_together(self, pieces: Iterable[TensorBox], device: torch.device) -> None:
        """Fill ``pieces`` on all ranks, which may exchange what they read by collectives on ``device``."""
        self.fill(pieces)

    def check_names(
        self, needed: Mapping[str, tuple[int, ...]], is_unused: Callable[[str], bool] = lambda name: False
    ) -> None:
        """``CheckpointError`` unless the tensors that a run needs, by name and global shape, are stored.

        ``is_unused(name)``: whether a tensor may be stored although it is not needed.

        Folders of Hugging Face are compared with their model when they are opened, and have nothing to check here.
        """
