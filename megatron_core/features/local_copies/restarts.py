"""Checkpoints for a fast restart in the memory of each host."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from megatron_core.checkpoint import CheckpointReader, Save, TensorBox, open_newest
from megatron_core.checkpoint.folder import find_candidates, iteration_of
from megatron_core.checkpoint.writer import Agree
from megatron_core.config import CheckpointConfig
from megatron_core.errors import CheckpointError
from megatron_core.features.local_copies.copies import save_copies
from megatron_core.features.local_copies.hosts import Hosts, find_hosts
from megatron_core.features.local_copies.restore import open_copies
from megatron_core.features.local_copies.settings import LocalCopiesConfig
from megatron_core.training.fast_restarts import FastRestarts


class LocalRestarts(FastRestarts):
    """Each host stores the files of its ranks and copies for other hosts, instead of one folder for all ranks."""

    is_global = False

    def __init__(self, settings: CheckpointConfig, device: torch.device) -> None:
        super().__init__(settings, device)
        self._local = settings.section(LocalCopiesConfig)
        self._hosts: Hosts | None = None

    def folder(self, save: str) -> Path:
        """The folder in this host's memory."""
        return self._local.local_folder

    def folders_to_lock(self, save: str, rank: int) -> dict[str, Path]:
        """Find the hosts; the first rank of each host creates and locks its folder."""
        self._hosts = find_hosts(self._local.local_folder, self.device)
        return {"non_persistent_local_ckpt_dir": self._local.local_folder} if self._hosts.is_first else {}

    def notes(self) -> Iterator[str]:
        """Yield a sentence if the hosts are fewer than ``replication_factor``."""
        count = 0 if self._hosts is None else len({*self._hosts.of_rank})
        if self._local.replication and count < self._local.replication_factor:
            yield (
                f"replication_factor={self._local.replication_factor}, but the ranks are on {count} "
                f"host{'s' * (count > 1)}: only this number of copies is written"
            )

    def write(self, save: Save, pieces: Iterable[TensorBox], agree: Agree) -> bool:
        """Write the checkpoint and its copies before the next step; return True."""
        assert self._hosts is not None, "folders_to_lock has found the hosts"
        save = replace(save, extra_files={})
        factor = self._local.replication_factor if self._local.replication else 1
        jump = self._local.replication_jump
        save_copies(save, pieces, self._hosts, agree, self.device, jump=jump, factor=factor)
        return True

    def open(self, *, hash_later: bool, damaged: Mapping[Path, str]) -> CheckpointReader | None:
        """Open the newest intact checkpoint, in the memory of the hosts or in the folder of ``load``."""
        local, load = self._local.local_folder, self.settings.load
        step, verify = self.settings.ckpt_step, self.settings.verify_checkpoint
        assert load is not None
        reader: CheckpointReader | None = open_copies(local, load, step, verify=verify, device=self.device)
        if reader is not None:
            return reader
        fault = None
        try:
            reader = open_newest(load, step, verify=verify, damaged=damaged, device=self.device)
        except CheckpointError as error:
            fault = error
        sound = -1 if reader is None else reader.manifest.iteration
        if step is None and sound < max(map(iteration_of, find_candidates(load).folders), default=-1):
            # Copies are not newer than the damaged checkpoint on disk, but may be newer than the intact one.
            reader = open_copies(local, load, step, verify=verify, device=self.device, sound=sound) or reader
        if reader is None and fault is not None:
            raise fault
        return reader
