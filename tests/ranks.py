"""Forked ranks for tests: a function runs in every rank of a small gloo world, and its results come back."""

from __future__ import annotations

import multiprocessing as mp
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from megatron_core import parallel_state

TIMEOUT = 120.0


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, timeout: float = TIMEOUT) -> list[Any]:
    """Call ``function(*args)`` in ``world_size`` forked ranks and return their results by rank.

    If a rank raises, the test fails with the traceback of the first one that did; ranks that hang are ended after
    ``timeout`` seconds.
    """
    context = mp.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_child, args=(rank, world_size, os.path.join(folder, "store"), theirs, function, args)
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            return _collect(pipes, timeout)
        finally:
            for process in processes:
                process.join(timeout=5)
                if process.is_alive():
                    process.kill()
                    process.join()


def _child(
    rank: int,
    world_size: int,
    store: str,
    pipe: Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)  # a child that was forked after its parent used OpenMP threads hangs otherwise
    parallel_state.destroy_model_parallel()  # what the parent made current is no layout of this world
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=60),
        )
        pipe.send((True, function(*args)))
    except BaseException:  # whatever it is, the parent shows it
        pipe.send((False, f"rank {rank}:\n{traceback.format_exc()}"))
    finally:
        pipe.close()
        os._exit(0)  # no exit handlers of the parent's pytest in here


def _collect(pipes: list[Connection], timeout: float) -> list[Any]:
    deadline = time.monotonic() + timeout
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        pending = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in results}
        ready = wait(list(pending), timeout=max(deadline - time.monotonic(), 0.0))
        if not ready:
            raise AssertionError(f"ranks {sorted(pending.values())} did not finish within {timeout} s")
        for pipe in ready:
            rank = pending[pipe]
            try:
                succeeded, results[rank] = pipe.recv()
            except EOFError:
                raise AssertionError(f"rank {rank} died without a word") from None
            if not succeeded:
                raise AssertionError(results[rank])
    return [results[rank] for rank in range(len(pipes))]
