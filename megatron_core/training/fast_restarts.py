"""Checkpoints for a fast restart, of which only the newest is kept: where they are written and found."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch

from megatron_core.checkpoint import CheckpointReader, Save, TensorBox, open_newest
from megatron_core.checkpoint.writer import Agree
from megatron_core.config import CheckpointConfig
from megatron_core.errors import ConfigError
from megatron_core.feature import features, load_hook


class FastRestarts:
    """Fast restarts from one folder that all ranks can read; base class of ``Feature.fast_restarts``."""

    is_global = True
    """Whether all ranks see the same folder."""

    def __init__(self, settings: CheckpointConfig, device: torch.device) -> None:
        self.settings, self.device = settings, device

    def folder(self, save: str) -> Path:
        """The folder for the checkpoints of a run that saves to ``save``."""
        return self.settings.temporary_folder(save)

    def folders_to_lock(self, save: str, rank: int) -> dict[str, Path]:
        """Return the folders that this rank creates and locks, by their settings; a collective call.

        Errors: ``CheckpointError`` on all ranks.
        """
        # One lock for the job: the folder is the same on all ranks.
        return {"non_persistent_global_ckpt_dir": self.folder(save)} if rank == 0 else {}

    def notes(self) -> Iterator[str]:
        """Yield sentences that the first rank prints after the folders are locked."""
        yield from ()

    def write(self, save: Save, pieces: Iterable[TensorBox], agree: Agree) -> bool:
        """Write the checkpoint ``save`` and return True; or return False, and it is written as all others.

        Errors: ``CheckpointError`` on all ranks.
        """
        return False

    def open(self, *, hash_later: bool, damaged: Mapping[Path, str]) -> CheckpointReader | None:
        """Open the newest intact checkpoint, for a fast restart or in the folder of ``load``; a collective call.

        ``hash_later`` and ``damaged``: see ``open_newest``.
        """
        settings = self.settings
        assert settings.load is not None
        return open_newest(
            settings.load,
            settings.ckpt_step,
            self.folder(settings.load),
            verify=settings.verify_checkpoint,
            hash_later=hash_later,
            damaged=damaged,
            device=self.device,
        )


def fast_restarts(settings: CheckpointConfig, device: torch.device) -> FastRestarts:
    """The fast restarts of ``--non-persistent-ckpt-type``."""
    name = settings.non_persistent_ckpt_type
    if name == "global":
        return FastRestarts(settings, device)
    hooks = {name: hook for feature in features() for name, hook in feature.fast_restarts.items()}
    if name not in hooks:
        raise ConfigError(f"non_persistent_ckpt_type={name}, but this package lacks its feature; use global")
    return load_hook(hooks[name])(settings, device)
