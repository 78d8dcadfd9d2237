"""A small world of processes on this machine: a function runs in every rank, and its results come back."""

import multiprocessing as mp
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch._dynamo  # recomputation loads it, in 1.5 s; loaded here, every forked rank has it
import torch.distributed as dist

from megatron_core import parallel_state
from megatron_core.errors import MegatronError
from megatron_core.parallel import World
from megatron_core.parallel.launch import join


class RankFailure(MegatronError):
    """A rank raised, died or did not finish; the message has the traceback of the first one that did."""


@dataclass(frozen=True)
class _RankSetup:
    """What a process needs to know to be a rank."""

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
    """Call ``function(*args)`` in ``world_size`` processes joined by torch.distributed; results by rank.

    ``device="cpu"`` forks the ranks and joins them over shared memory, or over gloo if ``backend`` says so; ``"cuda"``
    gives each a GPU of its own and joins them over NCCL (spawned, because CUDA does not survive a fork: ``function``
    and ``args`` must be picklable). Results go through a pipe: arrays of numpy, not tensors. Ranks that hang are ended
    after ``timeout`` seconds.
    Errors: ``RankFailure``.
    """
    context: Any = mp.get_context("fork" if device == "cpu" else "spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes: list[Connection] = []
        processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            setup = _RankSetup(rank, world_size, device, os.path.join(folder, "store"), backend)
            # A forked rank inherits the parent's ends; were they open, no rank would notice that the parent has gone.
            inherited = [*pipes, ours] if device == "cpu" else []
            process = context.Process(target=_run_rank, args=(setup, theirs, inherited, function, args))
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
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


def this_world() -> World:
    """The ``World`` of a rank that ``run_ranks`` started."""
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
    torch.set_num_threads(1)  # a child that was forked after its parent used OpenMP threads hangs otherwise
    parallel_state.destroy_model_parallel()  # what the parent made current is no layout of this world
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
        pipe.recv()  # a rank that left now would close connections that slower ones are still making
    except BaseException:  # whatever it is, the parent shows it
        pipe.send((False, f"rank {setup.rank}:\n{traceback.format_exc()}"))
    finally:
        pipe.close()
        os._exit(0)  # no exit handlers of the parent in here


def _collect(pipes: list[Connection], timeout: float) -> list[Any]:
    deadline = time.monotonic() + timeout
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        pending = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in results}
        ready = wait(list(pending), timeout=max(deadline - time.monotonic(), 0.0))
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
