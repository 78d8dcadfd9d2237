"""Starting and ending a process of the job: rank, device, torch.distributed, and errors that are printed once."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from megatron_core.errors import LayoutError, MegatronError
from megatron_core.parallel.shared_memory import backend as shared_memory
from megatron_core.parallel.shared_memory.work import LostRankError


@dataclass
class World:
    """This process's rank and device, as the launcher set them."""

    rank: int
    size: int
    local_rank: int
    device: torch.device
    store: dist.Store | None = None
    """The key-value store that the job's processes share, once they have met."""
    prefix: str = ""
    """How this rank's messages begin (``[pp1 dp0 tp1]``), once the layout is known."""

    @classmethod
    def from_environment(cls) -> World:
        """Read ``RANK``, ``WORLD_SIZE`` and ``LOCAL_RANK`` as torchrun sets them; alone without them."""
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
        device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
        return cls(int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)), local_rank, device)


def start_world(world: World, *, backend: str = "auto", timeout_minutes: float = 10.0) -> None:
    """Join the job's processes: nccl where each process has a GPU of its own, else shared memory between the ranks of
    a host and gloo between hosts. ``LayoutError`` if ``backend`` is ``shm`` and the ranks cannot share memory."""
    if world.device.type == "cuda":
        if world.local_rank >= torch.cuda.device_count():
            raise LayoutError(
                f"local rank {world.local_rank} has no GPU, this machine has {torch.cuda.device_count()}; start fewer "
                "processes (--nproc-per-node), or hide the GPUs with CUDA_VISIBLE_DEVICES='' to run on the CPU"
            )
        torch.cuda.set_device(world.device)
    if world.size == 1:
        return
    timeout = timedelta(minutes=timeout_minutes)
    world.store, rank, size = next(dist.rendezvous("env://", timeout=timeout))
    join(backend, world.device.type, store=world.store, rank=rank, world_size=size, timeout=timeout)


def join(backend: str, device_type: str, **settings: Any) -> None:
    """``dist.init_process_group`` with ``settings`` and a backend of ``distributed_backend``, ``auto`` included."""
    shared_memory.register()
    if backend == "nccl" and device_type != "cuda":
        if settings["rank"] == 0:
            print("note: distributed_backend=nccl needs GPUs; without them it is auto, for CPU ranks", file=sys.stderr)
        backend = "auto"
    chosen = backend if backend != "auto" else "nccl" if device_type == "cuda" else shared_memory.BACKEND
    if chosen == shared_memory.BACKEND and device_type == "cuda":
        raise LayoutError("distributed_backend='shm' is for ranks on the CPU; take auto or nccl")
    dist.init_process_group(chosen, **settings)
    reason = shared_memory.unavailable_reason() if backend == shared_memory.BACKEND else None
    if reason is not None:
        raise LayoutError(f"distributed_backend='shm': {reason}; take auto, which then goes through gloo, or gloo")


def run_job(world: World, job: Callable[[], None]) -> NoReturn:
    """Run ``job`` and exit; an error that a user can fix is one message, not a traceback from each rank."""
    status = 0
    try:
        job()
    except MegatronError as error:
        _print_once(str(error), world)
        status = 1
    except KeyboardInterrupt:
        _print_once("interrupted", world)
        status = 130
    except RuntimeError as error:
        if not _is_lost_peer(error):
            raise
        reason = "the reason is in that rank's message, or it was killed (out of memory?)"
        named = f": {error}" if isinstance(error, LostRankError) else ""
        _print_once(f"this job ends because another rank has left it{named}; {reason}", world)
        status = 1
    _leave(status)


def _leave(status: int) -> NoReturn:
    """Exit. With other ranks, without C++'s teardown: a thread of gloo is sometimes still running then,
    which aborts a job that has completed."""
    if not dist.is_initialized():
        sys.exit(status)
    if status == 0:
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _print_once(message: str, world: World) -> None:
    """Print an error on the first rank that meets it; before the ranks have met, on rank 0."""
    if world.store is None:
        first = world.rank == 0
    else:
        try:
            first = world.store.add("error/" + hashlib.sha256(message.encode()).hexdigest(), 1) == 1
        except RuntimeError:  # the store's own process has gone: better twice than never
            first = True
    if first:
        print(f"{world.prefix} error: {message}".lstrip(), file=sys.stderr, flush=True)
    _report_to_torchrun(message)


def _report_to_torchrun(message: str) -> None:
    """Leave the message where torchrun looks for it, so that its closing report names the cause."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        report = {"message": {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}}
        Path(path).write_text(json.dumps(report))


def _is_lost_peer(error: RuntimeError) -> bool:
    """Whether a collective failed because another process has gone."""
    signs = ("closed by peer", "reset by peer", "Broken pipe", "gloo/transport")
    return isinstance(error, dist.DistBackendError) or any(sign in str(error) for sign in signs)
