"""Rank, size and device of this process in the job."""

import os
import time
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron_core.errors import LayoutError, RestartNeeded
from megatron_core.launcher import WAY_OUT, read_integer, read_launcher
from megatron_core.parallel.time_limit import within

STORE_SECONDS = 5.0
"""Time limit for operations on a store that may not answer."""
_ENDED = "ended"
"""Key in the store that releases the spare ranks."""


class RankMonitor(Protocol):
    """Detects lost or hanging ranks: ``resilience.watchdog``, or with recovery ``resilience.processes.monitor``."""

    prefix: str

    def beat(self, iteration: int) -> None:
        """Report progress: step ``iteration`` begins."""

    def rest(self) -> None:
        """Expect no progress until the next ``beat``."""

    def leave(self, reason: str) -> None:
        """End the monitoring; ``reason``: the error with which this rank ends, or ""."""

    def report(self, reason: str, error: BaseException | None = None) -> str:
        """Report a failure to all ranks, print ``reason``, and return what was printed."""


@dataclass
class World:
    """Rank and device of this process, from the launcher's environment variables."""

    rank: int
    size: int
    """Number of participating ranks; ranks from here on are spare."""
    local_rank: int
    device: torch.device
    spares: int = 0
    """Number of spare ranks, which wait because the layout or the batch cannot be split over them."""
    store: dist.Store | None = None
    """The job's shared key-value store, once this process has joined."""
    prefix: str = ""
    """Prefix of this rank's messages (``[pp1 dp0 tp1]``), once the layout is known."""
    watchdog: RankMonitor | None = None
    """Detects lost or hanging ranks, once this process has joined."""
    launched: tuple[int, ...] = ()
    """The launcher's rank of each rank, if the ranks of the process groups may be others; for messages."""
    launcher_size: int = 0
    """The launcher's number of ranks, if the process groups may have fewer."""
    memory: Any = None
    """``recovery.memory.HostMemory`` that outlives this process, if a supervisor replaces it after a failure."""

    @classmethod
    def from_environment(cls) -> "World":
        """Read ``RANK``, ``WORLD_SIZE`` and ``LOCAL_RANK``, set by torchrun, or else the variables of srun or mpirun; a
        single process if all are unset.

        Errors: ``LayoutError`` for values that are missing, not integers, or out of range.
        """
        read_launcher()
        size = read_integer("WORLD_SIZE", 1, least=1)
        rank = read_integer("RANK", 0)
        local_rank = read_integer("LOCAL_RANK", 0)
        # With RANK missing, every process would take itself for rank 0 and write the same files.
        if size > 1 and "RANK" not in os.environ:
            raise LayoutError(f"WORLD_SIZE={size}, but RANK is not set; {WAY_OUT}")
        if rank >= size:
            raise LayoutError(f"RANK={rank} is not below WORLD_SIZE={size}; {WAY_OUT}")
        return cls(rank, size, local_rank, _device(local_rank))

    def use(self, size: int) -> None:
        """Use the first ``size`` ranks and make the others spare."""
        self.spares += self.size - size
        self.size = size

    def launcher_rank(self, rank: int) -> int:
        """The launcher's rank of a rank of the process groups."""
        return self.launched[rank] if self.launched else rank

    @property
    def is_spare(self) -> bool:
        """Whether this rank is spare."""
        return self.rank >= self.size

    def wait_for_end(self) -> None:
        """On a spare rank, wait until the others have ended.

        Under torchrun, exiting earlier would count as the end of the whole node, which could not rejoin after a
        restart.

        Errors: ``RestartNeeded`` if the store is gone. If other ranks fail, the watchdog ends this process.
        """
        while True:
            # Polls, because a blocking wait of the store has a time limit, and training may take months.
            time.sleep(1.0)
            try:
                if self.store is None:
                    return
                if self.store.check([_ENDED]):
                    return self.store.set(f"{_ENDED}/{self.rank}", "1")
            except (RuntimeError, OSError):
                raise RestartNeeded("the active ranks ended while this spare rank was waiting") from None

    def release_spares(self) -> None:
        """On rank 0, at the end of the job, let the spare ranks exit."""
        store = self.store
        if store is not None and self.spares and self.rank == 0:
            spares = [f"{_ENDED}/{rank}" for rank in range(self.size, self.size + self.spares)]
            store.set(_ENDED, "1")
            within(STORE_SECONDS, lambda: store.wait(spares), otherwise=None)  # this process may host the store


def _device(local_rank: int) -> torch.device:
    """The device of a rank: its GPU if there are any, else the CPU."""
    # By NVML: a call of CUDA here would keep it from processes that --recover forks later.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    if not torch.cuda.is_available():
        return torch.device("cpu")
    # With these variables Slurm shows each process only its own GPU.
    is_bound = torch.cuda.device_count() == 1 and {"SLURM_GPUS_PER_TASK", "SLURM_GPU_BIND"} & os.environ.keys()
    return torch.device("cuda", 0 if is_bound else local_rank)
