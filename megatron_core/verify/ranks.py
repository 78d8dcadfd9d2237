"""Run a function in every rank of a small world of processes on this machine, and return its results."""

import gc
import multiprocessing as mp
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch._dynamo  # recomputation imports it, which takes 1.5 s; forked ranks inherit the import
import torch.distributed as dist

from megatron_core import parallel_state
from megatron_core.cpu_ranks.simulated.divided import consecutive, run_divided
from megatron_core.errors import MegatronError
from megatron_core.parallel import World
from megatron_core.parallel.grid import Grid
from megatron_core.parallel.launch import join
from megatron_core.planner.layout import Layout
from megatron_core.verify.rank_failure import RankFailure

DIVIDED = 64
"""Ranks of a simulated world from which on it is divided over processes."""
MOST_PROCESSES = 16


@dataclass(frozen=True)
class _RankSetup:
    """Parameters of a process for joining the world as a rank."""

    rank: int
    world_size: int
    device: str
    store: str
    backend: str


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = 120.0,
    device: str = "cpu",
    backend: str = "auto",
) -> list[Any]:
    """Call ``function(*args)`` in ``world_size`` processes joined by torch.distributed; return the results by rank.

    ``device="cpu"`` forks the ranks and joins them over shared memory, or over gloo with ``backend="gloo"``; ``"cuda"``
    spawns one rank per GPU and joins them over NCCL (CUDA does not support fork; ``function`` and ``args`` must be
    picklable). Results are sent through a pipe: use numpy arrays, not tensors. Ranks that hang are killed after
    ``timeout`` seconds.
    Errors: ``RankFailure``.
    """
    # Start the ranks.
    context: Any = mp.get_context("fork" if device == "cpu" else "spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes: list[Connection] = []
        processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            setup = _RankSetup(rank, world_size, device, os.path.join(folder, "store"), backend)
            # A forked rank inherits the parent's pipe ends; if they stayed open, ranks could not detect its exit.
            inherited = [*pipes, ours] if device == "cpu" else []
            process = context.Process(target=_run_rank, args=(setup, theirs, inherited, function, args))
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        # Collect the results, let the ranks exit, and kill ranks that do not exit in time.
        grace = 0.0
        try:
            results = _collect(pipes, timeout)
            for pipe in pipes:
                pipe.send("all ranks are done")
            grace = 5.0
            return results
        finally:
            for process in processes:
                process.join(timeout=grace)
                if process.is_alive():
                    process.kill()
                    process.join()


@dataclass(frozen=True)
class Simulated:
    """The result of a simulated world, and what it took."""

    result: Any
    processor_seconds: float
    bytes: int
    """Sum of the largest memory of each process."""


def run_simulated(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    finish: Callable[[list[Any]], Any] = list,
    timeout: float | None = None,
    layout: Layout | None = None,
) -> Simulated:
    """Call ``function(*args)`` on ``world_size`` simulated ranks in forked processes; return ``finish(results)``.

    Worlds of ``DIVIDED`` ranks are divided over the cores of this machine, by copies of the model if ``layout`` is
    given and has enough. Ranks that wait for each other are found without a time limit; ``timeout`` seconds end ranks
    that compute forever.
    Errors: ``RankFailure`` with the first rank that fails, or with what each rank waits for if all do.
    """
    processes = min(len(os.sched_getaffinity(0)), MOST_PROCESSES) if world_size >= DIVIDED else 1
    ranks_of_process = (whole_copies(layout, processes) if layout else None) or consecutive(world_size, processes)
    try:
        divided = run_divided(ranks_of_process, partial(function, *args), timeout)
    except MegatronError as error:
        raise RankFailure(str(error)) from None
    return Simulated(finish(divided.results), divided.processor_seconds, divided.bytes)


def whole_copies(layout: Layout, processes: int) -> list[list[int]] | None:
    """The ranks of ``processes`` parts of whole copies of the model; None if experts are split over more of them.

    Copies exchange little, so that all processes compute at the same time.
    """
    grid = Grid(tp=layout.tp, cp=layout.cp, dp=layout.dp, pp=layout.pp, ep=layout.ep, etp=layout.etp)
    process_of = {rank: grid.coordinates(rank)["dp"] * processes // layout.dp for rank in grid.ranks()}
    if layout.dp < processes or any(len({process_of[rank] for rank in ranks}) > 1 for ranks in grid.groups("etp-ep")):
        return None
    return [[rank for rank in grid.ranks() if process_of[rank] == process] for process in range(processes)]


def this_world() -> World:
    """The ``World`` of a rank started by ``run_ranks``."""
    rank = dist.get_rank()
    cuda = dist.get_backend() == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    return World(rank, dist.get_world_size(), local_rank=rank, device=device)


def _run_rank(
    setup: _RankSetup,
    pipe: Connection,
    inherited: list[Connection],
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    for end in inherited:
        end.close()
    gc.freeze()  # the parent's garbage may belong to threads that a child does not have
    torch.set_num_threads(1)  # otherwise a child hangs if its parent used OpenMP threads before the fork
    parallel_state.destroy_model_parallel()  # the parent's groups are invalid in this world
    try:
        if setup.device == "cuda":
            torch.cuda.set_device(setup.rank)
        join(
            setup.backend,
            setup.device,
            init_method=f"file://{setup.store}",
            rank=setup.rank,
            world_size=setup.world_size,
            timeout=timedelta(seconds=60),
        )
        pipe.send((True, function(*args)))
        pipe.recv()  # exiting now would close connections that slower ranks are still establishing
    except BaseException:  # the parent reports any exception
        pipe.send((False, f"rank {setup.rank}:\n{traceback.format_exc()}"))
    finally:
        pipe.close()
        os._exit(0)  # do not run the parent's exit handlers


def _collect(pipes: list[Connection], timeout: float | None) -> list[Any]:
    deadline = None if timeout is None else time.monotonic() + timeout
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        pending = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in results}
        ready = wait(list(pending), timeout=None if deadline is None else max(deadline - time.monotonic(), 0.0))
        if not ready:
            raise RankFailure(f"ranks {sorted(pending.values())} did not finish within {timeout:.0f} s")
        for pipe, rank in pending.items():
            if pipe not in ready:
                continue
            try:
                succeeded, results[rank] = pipe.recv()
            except EOFError:
                raise RankFailure(f"rank {rank} exited without a result") from None
            if not succeeded:
                raise RankFailure(results[rank])
    return [results[rank] for rank in range(len(pipes))]
