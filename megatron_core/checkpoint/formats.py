"""Formats of other programs. A run imports one only if a setting names it, or if a folder has no checkpoint of ours."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_core.checkpoint.state_reader import StateReader
from megatron_core.config import ModelConfig, RunConfig
from megatron_core.config.checkpoint import FormatRow
from megatron_core.feature import features, load_hook

Exchange = Callable[[str], list[str]]
"""A collective call: this rank's text -> the texts of all ranks."""


class CheckpointFormat:
    """Base class of ``FormatRow.hook``; override the methods that the format supports."""

    is_openable = False
    """Whether ``open`` reads the weights of a folder in place."""
    resumes = False
    """Whether --load continues a training from a folder in this format."""

    def is_in(self, folder: Path) -> bool:
        """Whether a folder without a checkpoint of this program is in the format."""
        raise NotImplementedError

    def refusal(self, named: str, folder: Path, step: int | None = None) -> str:
        """Why a setting, ``named`` with its value, cannot read the folder, with the command that converts it."""
        raise NotImplementedError

    def settings(self, folder: Path) -> dict[str, Any]:
        """Flat settings of a run that trains the stored model."""
        raise NotImplementedError

    def iteration_folder(self, root: Path, step: int | None) -> Path:
        """The folder of iteration ``step``, by default the latest."""
        return root

    def open(self, root: Path, step: int | None = None, *, finetune: bool = False) -> StateReader:
        """Open iteration ``step``, by default the latest; ``finetune``: without the position of its training."""
        raise NotImplementedError

    def notes(self, folder: Path, config: RunConfig) -> Iterator[str]:
        """Yield notes for the user of a run of ``config`` that starts from the folder."""
        yield from ()

    def read_added(self, folder: Path, config: RunConfig, vocab_size: int) -> dict[str, Tensor]:
        """The weights that a feature adds to the model of ``config``, by name, if the format has only these."""
        return {}

    def write(self, native: Path, model: ModelConfig, save: Path, *, rank: int, ranks: int, exchange: Exchange) -> None:
        """Write the checkpoint ``native`` into ``save``, a folder with the name of the format; each rank writes a
        share, and ``exchange`` returns the texts of all ranks."""
        raise NotImplementedError


def _rows() -> Iterator[FormatRow]:
    for feature in features():
        yield from feature.checkpoint_formats


def _load(row: FormatRow) -> CheckpointFormat:
    return load_hook(row.hook)()


def formats_in(folder: Path, *, resumes: bool | None = None) -> list[CheckpointFormat]:
    """The formats of a folder without a checkpoint of this program, which may hold files of several programs.

    ``resumes``: only formats that --load continues, or only the others.
    """
    # Empty folders are those of most first runs, which need not import the formats.
    if not folder.is_dir() or not any(folder.iterdir()):
        return []
    return [form for form in map(_load, _rows()) if resumes in (None, form.resumes) and form.is_in(folder)]


def formats_of_settings(config: RunConfig) -> list[tuple[CheckpointFormat, Path]]:
    """The formats of folders that settings of their own name, such as --load-hf, and these folders."""
    flat = config.flat()
    rows = ((row, flat.get(row.setting)) for row in _rows() if row.setting is not None)
    return [(_load(row), Path(folder)) for row, folder in rows if folder is not None]


def format_that_writes(name: str) -> CheckpointFormat:
    """The format of a value of --ckpt-format."""
    return next(_load(row) for row in _rows() if name in row.writes)
