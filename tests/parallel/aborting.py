"""A program of two ranks whose backend aborts at its limit, as NCCL's: python -m tests.parallel.aborting CASE."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

from megatron_core.commands import start_ranks
from megatron_core.parallel import World, start_world, time_limit

SECONDS = 3.0


class Aborting(dist.ProcessGroup):
    """A group whose collectives never end; a thread aborts the process at the limit."""

    def __init__(self, rank: int, size: int, limit: float) -> None:
        super().__init__(rank, size)
        self._limit = limit

    def getBackendName(self) -> str:
        return "aborting"

    def allreduce(self, tensors: Any, options: Any = None) -> Any:
        """As the wait for a device behind a collective that does not end."""
        threading.Timer(self._limit, os.abort).start()
        time.sleep(120.0)


def create(options: Any, backend_options: Any) -> Aborting:
    """The constructor for torch.distributed."""
    return Aborting(options.group_rank, options.group_size, options.timeout.total_seconds())


def main() -> None:
    """The work of a rank: rank 0 reduces, rank 1 hangs."""
    [case] = sys.argv[1:]
    time_limit.FATAL = frozenset({"aborting"} if case == "known" else ())
    dist.Backend.register_backend("aborting", create, extended_api=True, devices=["cpu"])
    world = World.from_environment()
    start_world(world, backend="aborting", timeout_minutes=SECONDS / 60.0)
    assert world.watchdog is not None
    world.watchdog.beat(7)
    if world.rank == 0:
        dist.all_reduce(torch.ones(1))
    time.sleep(120.0)


if __name__ == "__main__":
    sys.argv = ["start_ranks", "2", "tests.parallel.aborting", *sys.argv[1:]]
    start_ranks.main()
