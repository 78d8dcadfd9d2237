"""Which ranks share a folder in host memory, and which other ranks keep copies of a rank's files."""

import os
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_core.checkpoint.chunks import page_cache_of
from megatron_core.output_file import make_folder
from megatron_core.parallel.texts import gather_from_all_ranks, raise_on_all_ranks


@dataclass(frozen=True)
class Hosts:
    """The host of every rank, identified by the lowest rank that shares its folder."""

    of_rank: tuple[int, ...]
    rank: int

    @property
    def own(self) -> int:
        """The host of this rank."""
        return self.of_rank[self.rank]

    @property
    def is_first(self) -> bool:
        """Whether this rank is the lowest of its host."""
        return self.own == self.rank

    def ranks(self, host: int) -> list[int]:
        """All ranks of a host."""
        return [rank for rank, other in enumerate(self.of_rank) if other == host]

    def keepers(self, rank: int, jump: int | None, factor: int) -> list[int]:
        """The ranks that keep copies of the files of ``rank``, so that ``factor`` hosts, including its own, have them.

        These are ``jump`` (default: the number of ranks of the first host), ``2 * jump``, ... ranks further; if that
        host has a copy already, the next rank on another host. Fewer if there are fewer hosts.
        """
        size, jump = len(self.of_rank), jump or len(self.ranks(self.of_rank[0]))
        having, found = {self.of_rank[rank]}, list[int]()
        for number in range(1, factor):
            others = ((rank + number * jump + step) % size for step in range(size))
            keeper = next((other for other in others if self.of_rank[other] not in having), None)
            if keeper is not None:
                having.add(self.of_rank[keeper])
                found.append(keeper)
        return found


def find_hosts(folder: Path, device: torch.device) -> Hosts:
    """Create ``folder`` on every host and find the ranks that share it; a collective call.

    Errors: ``CheckpointError`` on all ranks if one cannot.
    """
    name, problem = "", ""
    try:
        make_folder(folder)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(13, "no permission to write there")
        name = page_cache_of(folder)
        if not name:
            raise OSError("it cannot be read")
    except OSError as error:
        name = f"non_persistent_local_ckpt_dir={str(folder)!r}"
        problem = f"{name} cannot be written: {error}; choose a folder in each host's memory"
    raise_on_all_ranks(problem, device)
    names = gather_from_all_ranks(name, device)
    return Hosts(tuple(names.index(name) for name in names), dist.get_rank() if dist.is_initialized() else 0)
