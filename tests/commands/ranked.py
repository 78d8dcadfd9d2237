"""A program of two ranks: python ranked.py GRACE_SECONDS CASE."""

from __future__ import annotations

import os
import signal
import sys
import time
from types import FrameType

import torch
import torch.distributed as dist

from megatron_core.commands import start_ranks
from megatron_core.parallel import World, start_world


def main() -> int | None:
    """The work of a rank."""
    [case], rank = sys.argv[1:], int(os.environ["RANK"])
    if case == "sum":
        start_world(World.from_environment())
        total = torch.ones(1) + rank
        dist.all_reduce(total)
        print(f"rank {rank} of {os.environ['LOCAL_WORLD_SIZE']}: {total.item():g}, {torch.get_num_threads()} thread")
        sys.stdout.flush()
        os._exit(0)
    if rank == 1:
        time.sleep(0.2)  # rank 0 is ready
        match case:
            case "fails" | "refuses_to_end":
                return 3
            case "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "asked_to_save":
                os.kill(os.getppid(), signal.SIGUSR1)
            case "interrupted":
                os.kill(os.getppid(), signal.SIGINT)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN if case == "refuses_to_end" else _save)
    time.sleep(60)
    return None


def _save(number: int, frame: FrameType | None) -> None:
    print(f"rank {os.environ['RANK']} saves")
    sys.exit(0)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # tests before this one may have left another handler
    _, grace, case = sys.argv
    start_ranks.GRACE_SECONDS = int(grace)
    sys.argv = ["start_ranks", "2", "tests.commands.ranked", case]
    start_ranks.main()
