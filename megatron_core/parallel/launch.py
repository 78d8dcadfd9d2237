"""Start and end of a process of the job: rank, device, torch.distributed, and errors printed once."""

import atexit
import ctypes
import hashlib
import json
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from megatron_core.command import INTERRUPTED, begin_program
from megatron_core.errors import LayoutError, RestartNeeded, visible
from megatron_core.feature import features, load_hook
from megatron_core.launcher import read_integer
from megatron_core.parallel.exit_status import FAILED, RESTART, exit_explanation
from megatron_core.parallel.groups import SHARED_MEMORY
from megatron_core.parallel.time_limit import group_limit, set_nccl_limits, watchdog_limit, within
from megatron_core.parallel.transports import transport
from megatron_core.parallel.world import STORE_SECONDS, World
from megatron_core.terminal import discard

REPORT_SECONDS = 10.0
"""Time in which the launcher ends the other ranks after rank 0 has printed an error and ended."""
DEFAULT_TIMEOUT = timedelta(minutes=10)
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def start_world(world: World, *, backend: str = "auto", timeout_minutes: float = 10.0) -> None:
    """Join the job's processes.

    Backends: nccl if each process has its own GPU, else shared memory between the ranks of a host and gloo between
    hosts. Spare ranks only join the store. Errors: ``LayoutError`` if ``backend`` is ``shm`` and the ranks cannot share
    memory.
    """
    if world.device.type == "cuda":
        if world.device.index >= torch.cuda.device_count():
            raise LayoutError(
                f"local rank {world.local_rank} has no GPU, this machine has {torch.cuda.device_count()}; start fewer "
                "processes (--nproc-per-node), give each process of srun its own GPU (--gpus-per-task 1), or hide the "
                "GPUs with CUDA_VISIBLE_DEVICES='' to run on the CPU"
            )
        torch.cuda.set_device(world.device)
    # One process needs neither a store nor a port, and runs on machines where none can be opened.
    if world.size + world.spares == 1:
        return
    timeout = timedelta(minutes=timeout_minutes)
    # The store first: its errors name the address, and the watchdog, spare ranks and error messages need it even if
    # torch.distributed does not start.
    world.store = connect(world, timeout)
    if world.size > 1 and not world.is_spare:
        join(backend, world.device.type, store=world.store, rank=world.rank, world_size=world.size, timeout=timeout)
    joined = dist.get_backend() if dist.is_initialized() else "gloo"
    patience = watchdog_limit(joined, timeout.total_seconds())
    # Every program with several ranks has it, before its settings are known.
    for monitor in (load_hook(feature.rank_monitor) for feature in features() if feature.rank_monitor is not None):
        world.watchdog = monitor(world.store, world.rank, world.size, patience, RESTART)


def connect(world: World, timeout: timedelta) -> dist.Store:
    """Connect to the store at ``MASTER_ADDR:MASTER_PORT``; ``LayoutError`` if the ranks cannot connect."""
    address = os.environ.get("MASTER_ADDR", "")
    port = read_integer("MASTER_PORT", 0)
    if not address or not 0 < port < 65536:
        raise LayoutError(
            f"MASTER_ADDR={address!r} and MASTER_PORT={port}: the rendezvous needs rank 0's address and a free port "
            "from 1 to 65535; start the ranks with torchrun, which sets both, or export both to all ranks"
        )
    try:
        store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
        return _select_attempt(store, world, timeout.total_seconds())
    # An impossible address or port raises ValueError or OSError instead of torch's error.
    except (dist.DistError, ValueError, OSError) as error:
        first = str(error).splitlines()[0][:300]
        taken = "EADDRINUSE" in str(error) or "already in use" in str(error)
        way_out = (
            "another process has this port; choose a free one (torchrun --master-port)"
            if taken
            else "check the address, that rank 0 runs, and that no firewall blocks the port"
        )
        raise LayoutError(f"rendezvous at {address}:{port} failed: {way_out} ({first})") from None


def connect_to_running_job(world: World, timeout: timedelta) -> dist.Store:
    """Connect to the store of a running job, in the place of a rank that was lost; ``LayoutError`` if there is none."""
    if world.rank == 0:
        raise LayoutError("RANK=0 cannot join a running job, whose store ended with it; restart the job")
    try:
        store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
        return dist.PrefixStore(store.get("attempt").decode(), store)
    except (dist.DistError, ValueError, OSError) as error:
        where = f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}"
        first = str(error).splitlines()[0][:300]
        raise LayoutError(f"no running job answers at MASTER_ADDR:MASTER_PORT={where} ({first})") from None


def _select_attempt(store: dist.Store, world: World, seconds: float) -> dist.Store:
    """A view of ``store`` without keys of earlier attempts: torchrun's store outlives the ranks it restarts.

    Rank 0 publishes a random name of this attempt, every other rank answers with a random word, and rank 0 publishes
    all words. A rank that does not find its word has read the name of an earlier attempt, and reads again.
    """
    word = secrets.token_hex(8)
    name = ""
    if world.rank == 0:
        store.set("attempt", word)
        words = []
        for rank in range(1, world.size + world.spares):
            try:
                words.append(store.get(f"{word}/{rank}").decode())
            except RuntimeError:
                raise TimeoutError(f"rank {rank} did not join within {seconds:.0f} s") from None
        store.set(f"{word}/all", " ".join(words))
        return dist.PrefixStore(word, store)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        announced = store.get("attempt").decode()
        # This may be the name of an earlier attempt; an answer to it has no effect.
        if announced != name:
            name = announced
            store.set(f"{name}/{world.rank}", word)
        if store.check([f"{name}/all"]) and word in store.get(f"{name}/all").decode():
            return dist.PrefixStore(name, store)
        time.sleep(0.01)
    raise TimeoutError(f"rank 0 did not answer rank {world.rank} within {seconds:.0f} s")


def end_with_launcher() -> None:
    """Ask the kernel to send SIGTERM to this rank if its launcher dies, so no orphan process continues training.

    On SIGTERM the rank finishes its step, saves and exits. Only on Linux, under torchrun or ``--nproc-per-node``.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ or sys.platform != "linux":
        return
    # The launcher may have died before the request was made; then the kernel never sends the signal, and the parent is
    # already another process.
    launcher = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != launcher or (launcher == 1 and not _first_process_is_python()):
        os.kill(os.getpid(), signal.SIGTERM)


def _first_process_is_python() -> bool:
    """Whether process 1, which adopts orphans, may be the launcher itself, as in a container."""
    try:
        return "python" in os.readlink("/proc/1/exe")
    except OSError:
        return False


def join(backend: str, device_type: str, *, timeout: timedelta = DEFAULT_TIMEOUT, **settings: Any) -> None:
    """Call ``dist.init_process_group(**settings)`` with a backend of ``distributed_backend``, ``auto`` included.

    ``timeout``: time after which a job is stopped if its ranks do not answer, --distributed-timeout-minutes.
    """
    shared_memory = transport(SHARED_MEMORY)
    if shared_memory is not None:
        shared_memory.register()
    if backend == "nccl" and device_type != "cuda":
        if settings["rank"] == 0:
            print("note: distributed_backend=nccl needs GPUs; using auto on the CPU", file=sys.stderr)
        backend = "auto"
    chosen = backend
    if backend == "auto":
        for_cpu = "gloo" if shared_memory is None else SHARED_MEMORY
        chosen = "nccl" if device_type == "cuda" else for_cpu
    if chosen == SHARED_MEMORY and device_type == "cuda":
        raise LayoutError("distributed_backend='shm' runs on CPU ranks only; use auto or nccl")
    limit = group_limit(chosen, timeout.total_seconds())
    if chosen == "nccl":
        set_nccl_limits(limit)
    dist.init_process_group(chosen, timeout=timedelta(seconds=limit), **settings)
    # Only now: whether the ranks share a machine is known when they have joined.
    reason = None if shared_memory is None or backend != SHARED_MEMORY else shared_memory.unavailable_reason()
    if reason is not None:
        raise LayoutError(f"distributed_backend='shm': {reason}; use gloo, or auto, which then falls back to gloo")


def run_job(job: Callable[[World], None]) -> NoReturn:
    """Run ``job`` on this rank and exit; an error that a user can fix is printed as one message without traceback.

    The exit status is 0, ``FAILED``, ``RESTART`` or ``INTERRUPTED``.
    """
    begin_program()
    world: World | None = None
    try:
        end_with_launcher()
        world = World.from_environment()
        job(world)
    except KeyboardInterrupt:
        _print_and_exit(INTERRUPTED, world, "interrupted")
    except BrokenPipeError:  # the reader has closed the pipe
        discard(sys.stdout)
        _print_and_exit(FAILED, world, "standard output was closed")
    except Exception as error:
        explanation = exit_explanation(error)
        if explanation is None:
            if world is not None and world.watchdog is not None:
                world.watchdog.leave(f"{type(error).__name__}: {error}")
            raise
        status, message = explanation
        # A RestartNeeded was raised on all ranks for the same reason.
        is_news = not isinstance(error, RestartNeeded)  # other ranks do not know the error
        if status == RESTART and is_news and world is not None and world.watchdog is not None:
            _report_to_torchrun(world.watchdog.report(message, error))  # already printed
            _print_and_exit(status, world)
        _print_and_exit(status, world, message)
    _print_and_exit(0, world)


def _print_and_exit(status: int, world: World | None, message: str = "") -> NoReturn:
    """Print ``message`` and exit.

    With several ranks, skip C++ destructors: a thread of gloo or of the watchdog may still be running, and the
    destructors would abort a job that has completed.
    """
    # Texts of data and of other hosts may contain control characters, which could change what a terminal shows.
    message = visible(message)
    if message:
        _print_once(message, world, waits=status != INTERRUPTED)
    if world is not None and world.watchdog is not None:
        world.watchdog.leave(message)
    if world is None or world.store is None:
        if not dist.is_initialized():
            sys.exit(status)
        atexit._run_exitfuncs()  # megatron_core.initialize has joined the ranks; its metrics are closed at exit
    # After a failure other ranks may be gone, and destroying a group would wait for them.
    if status == 0 and dist.is_initialized():
        dist.destroy_process_group()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # full or closed: there is no other place to report it
            status = status or FAILED
    os._exit(status)


def _print_once(message: str, world: World | None, *, waits: bool = True) -> None:
    """Print an error on the first rank that raises it.

    Before the ranks have joined, rank 0 prints it, or after a delay the first rank of each machine: torchrun ends all
    ranks of a machine as soon as one has ended. A rank that is still running prints its own error.
    ``waits``: False after Ctrl-C, of which all ranks know; only rank 0 prints it then.
    """
    first = True
    if world is not None and world.store is None and world.rank > 0:
        first = waits
        if waits:
            time.sleep(REPORT_SECONDS if world.local_rank == 0 else 2 * REPORT_SECONDS)
    elif world is not None and world.store is not None:
        store = world.store
        # By content: ranks that fail for the same reason print it once, and another reason is printed as well.
        key = "error/" + hashlib.sha256(message.encode()).hexdigest()
        # If the store does not answer, printing twice is better than never.
        first = within(STORE_SECONDS, lambda: store.add(key, 1) == 1, otherwise=True)
    if first:
        print(f"{world.prefix if world else ''} error: {message}".lstrip(), file=sys.stderr, flush=True)
    _report_to_torchrun(message)


def _report_to_torchrun(message: str) -> None:
    """Write the message to torchrun's error file, so that its final report names the cause."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path and message:
        report = {"message": {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}}
        Path(path).write_text(json.dumps(report))
