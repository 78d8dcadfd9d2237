"""Starting and ending a process of the job: rank, device, torch.distributed, and errors that are printed once."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import re
import secrets
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from megatron_core.command import INTERRUPTED, begin_program, discard
from megatron_core.errors import LayoutError, MegatronError, visible
from megatron_core.parallel.shared_memory import backend as shared_memory
from megatron_core.parallel.shared_memory.work import LostRankError
from megatron_core.parallel.watchdog import Watchdog, within

FAILED = 1
"""Exit status: an error that a restart would meet again: settings, data, the same failure twice at one step."""
RESTART = 75
"""Exit status: another rank is lost or hangs; a restart from the last checkpoint may help (EX_TEMPFAIL)."""
STORE_SECONDS = 5.0
"""How long a store that does not answer is waited for."""
_ENDED = "ended"
"""The store's key that lets spare ranks go."""
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class RestartNeeded(MegatronError):
    """This attempt has ended and saved; its launcher starts the next one with the ranks that are left."""


@dataclass
class World:
    """This process's rank and device, as the launcher set them."""

    rank: int
    size: int
    """Ranks that take part; those from here on are spare."""
    local_rank: int
    device: torch.device
    spares: int = 0
    """Ranks that wait, because the layout or the batch cannot be split over them."""
    store: dist.Store | None = None
    """The key-value store that the job's processes share, once they have met."""
    prefix: str = ""
    """How this rank's messages begin (``[pp1 dp0 tp1]``), once the layout is known."""
    watchdog: Watchdog | None = None
    """What notices that ranks are lost or hang, once they have met."""

    @classmethod
    def from_environment(cls) -> World:
        """Read ``RANK``, ``WORLD_SIZE`` and ``LOCAL_RANK`` as torchrun sets them; alone without them.

        Errors: ``LayoutError`` for values that are absent, no numbers or out of range.
        """
        size = _number("WORLD_SIZE", 1, least=1)
        rank, local_rank = _number("RANK", 0), _number("LOCAL_RANK", 0)
        if size > 1 and "RANK" not in os.environ:
            raise LayoutError(f"WORLD_SIZE={size}, but RANK is not set; {_LAUNCHER}")
        if rank >= size:
            raise LayoutError(f"RANK={rank} is not below WORLD_SIZE={size}; {_LAUNCHER}")
        device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
        return cls(rank, size, local_rank, device)

    def use(self, size: int) -> None:
        """Let the first ``size`` ranks take part and the others wait."""
        self.size, self.spares = size, self.size + self.spares - size

    @property
    def is_spare(self) -> bool:
        """Whether this rank waits."""
        return self.rank >= self.size

    def wait_for_end(self) -> None:
        """Of a spare rank: wait until the others have ended. Under torchrun an end of its own would count as the end
        of its whole node, which could not take part after the next restart.

        Errors: ``RestartNeeded`` if their store has gone. If they fail, the watchdog ends this process.
        """
        while True:
            time.sleep(1.0)
            try:
                if self.store is None:
                    return
                if self.store.check([_ENDED]):
                    return self.store.set(f"{_ENDED}/{self.rank}", "1")
            except (RuntimeError, OSError):
                raise RestartNeeded("the ranks that this spare rank waits for have gone") from None

    def release_spares(self) -> None:
        """Let the spare ranks end, too; by rank 0, when nothing is left to do."""
        store = self.store
        if store is not None and self.spares and self.rank == 0:
            spares = [f"{_ENDED}/{rank}" for rank in range(self.size, self.size + self.spares)]
            store.set(_ENDED, "1")
            within(STORE_SECONDS, lambda: store.wait(spares), otherwise=None)  # this process may host the store


_LAUNCHER = "start the ranks with torchrun, which sets it, or unset all of RANK, WORLD_SIZE and LOCAL_RANK for one rank"


def _number(name: str, default: int, least: int = 0) -> int:
    """A whole number of the environment."""
    text = os.environ.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) >= least):
        raise LayoutError(f"{name}={text!r} in the environment is no whole number from {least} on; {_LAUNCHER}")
    return int(text)


def start_world(world: World, *, backend: str = "auto", timeout_minutes: float = 10.0) -> None:
    """Join the job's processes: nccl where each process has a GPU of its own, else shared memory between the ranks of
    a host and gloo between hosts; spare ranks join the store alone. ``LayoutError`` if ``backend`` is ``shm`` and the
    ranks cannot share memory."""
    if world.device.type == "cuda":
        if world.local_rank >= torch.cuda.device_count():
            raise LayoutError(
                f"local rank {world.local_rank} has no GPU, this machine has {torch.cuda.device_count()}; start fewer "
                "processes (--nproc-per-node), or hide the GPUs with CUDA_VISIBLE_DEVICES='' to run on the CPU"
            )
        torch.cuda.set_device(world.device)
    if world.size + world.spares == 1:
        return
    timeout = timedelta(minutes=timeout_minutes)
    world.store = _meet(world, timeout)
    if world.size > 1 and not world.is_spare:
        join(backend, world.device.type, store=world.store, rank=world.rank, world_size=world.size, timeout=timeout)
    world.watchdog = Watchdog(world.store, world.rank, world.size, timeout.total_seconds(), RESTART)


def _meet(world: World, timeout: timedelta) -> dist.Store:
    """The store at ``MASTER_ADDR:MASTER_PORT``, empty; ``LayoutError`` if the ranks do not meet there."""
    address, port = os.environ.get("MASTER_ADDR", ""), _number("MASTER_PORT", 0)
    if not address or not 0 < port < 65536:
        raise LayoutError(
            f"MASTER_ADDR={address!r} and MASTER_PORT={port}: the ranks meet at rank 0's address and a free port from "
            "1 to 65535; start them with torchrun, which sets both"
        )
    try:
        store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
        return _of_this_attempt(store, world, timeout.total_seconds())
    except (dist.DistError, ValueError, OSError) as error:
        first = str(error).splitlines()[0][:300]
        taken = "EADDRINUSE" in str(error) or "already in use" in str(error)
        way_out = (
            "another process has this port; choose a free one (torchrun --master-port)"
            if taken
            else "is the address right, does rank 0 run, does a firewall let the port through?"
        )
        raise LayoutError(f"the ranks cannot meet at {address}:{port}: {way_out} ({first})") from None


def _of_this_attempt(store: dist.Store, world: World, seconds: float) -> dist.Store:
    """``store`` without what earlier attempts have left: under torchrun it outlives the ranks that it restarts.

    Rank 0 names this attempt, every other rank answers with a word of its own, and rank 0 repeats all of them: a rank
    that does not find its own has seen the name of an attempt that has ended.
    """
    word, name = secrets.token_hex(8), ""
    if world.rank == 0:
        store.set("attempt", word)
        words = []
        for rank in range(1, world.size + world.spares):
            try:
                words.append(store.get(f"{word}/{rank}").decode())
            except RuntimeError:
                raise TimeoutError(f"rank {rank} has not come within {seconds:.0f} s") from None
        store.set(f"{word}/all", " ".join(words))
        return dist.PrefixStore(word, store)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = store.get("attempt").decode()
        if found != name:
            name = found
            store.set(f"{name}/{world.rank}", word)
        if store.check([f"{name}/all"]) and word in store.get(f"{name}/all").decode():
            return dist.PrefixStore(name, store)
        time.sleep(0.01)
    raise TimeoutError(f"rank 0 has not answered rank {world.rank} within {seconds:.0f} s")


def end_with_launcher() -> None:
    """Let the kernel send SIGTERM to this rank when its launcher dies, however that happens, so that no orphan trains
    on: the rank finishes its step, saves and leaves. Only on Linux, and only under torchrun."""
    if "TORCHELASTIC_RUN_ID" not in os.environ or sys.platform != "linux":
        return
    launcher = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != launcher or (launcher == 1 and not _first_process_is_python()):
        os.kill(os.getpid(), signal.SIGTERM)


def _first_process_is_python() -> bool:
    """Process 1 adopts those whose parent has died; in a container it may also be torchrun itself."""
    try:
        return "python" in os.readlink("/proc/1/exe")
    except OSError:
        return False


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


def run_job(job: Callable[[World], None]) -> NoReturn:
    """Run ``job`` on this rank and exit; an error that a user can fix is one message, not a traceback from each rank.

    The exit status is 0, ``FAILED``, ``RESTART`` or ``INTERRUPTED``.
    """
    begin_program()
    world: World | None = None
    try:
        end_with_launcher()
        world = World.from_environment()
        job(world)
    except KeyboardInterrupt:
        _leave(INTERRUPTED, world, "interrupted")
    except BrokenPipeError:  # the reader of the output has closed it
        discard(sys.stdout)
        _leave(FAILED, world, "standard output was closed")
    except Exception as error:
        found = explained(error)
        if found is None:
            if world is not None and world.watchdog is not None:
                world.watchdog.leave(f"{type(error).__name__}: {error}")
            raise
        status, message = found
        knows = isinstance(error, RestartNeeded)  # what the other ranks do
        if status == RESTART and not knows and world is not None and world.watchdog is not None:
            _report_to_torchrun(world.watchdog.report(message, error))  # which it has printed
            _leave(status, world)
        _leave(status, world, message)
    _leave(0, world)


def explained(error: Exception) -> tuple[int, str] | None:
    """Exit status and message of an error that has a known reason; None for one that needs its traceback."""
    text = str(error)
    if isinstance(error, MegatronError):
        return RESTART if isinstance(error, RestartNeeded) else FAILED, text
    if allocation_that_failed(error) is not None:
        size = _SIZE.search(text)
        what = f"allocating {size[1]} {size[2]}" if size else "allocating a tensor"
        return FAILED, (
            f"out of memory while {what}. Ways out: a smaller --micro-batch-size, --recompute-granularity full "
            "--recompute-method uniform --recompute-num-layers 1, --zero-stage 1 to 3, or more tensor- or "
            "pipeline-parallel ranks; --dry-run prints what a rank needs"
        )
    if isinstance(error, LostRankError):
        return RESTART, text
    if isinstance(error, OSError) and error.strerror and not isinstance(error, ConnectionError | TimeoutError):
        where = str(error.filename or "a file or the standard output")
        return FAILED, f"{where[:200]} cannot be used: {error.strerror}; give another place, or make room there"
    if not isinstance(error, RuntimeError) or not _is_lost_peer(error):
        return None
    first = text.splitlines()[0][:300] if text else type(error).__name__
    if re.search("[Tt]imed ?out", text):
        return RESTART, (
            f"a collective was not complete within --distributed-timeout-minutes ({first}): a rank hangs or is slow; "
            "if it is only slow, raise --distributed-timeout-minutes"
        )
    return RESTART, f"another rank has left this job ({first}); the reason is in its message, or it was killed"


_OUT_OF_MEMORY = re.compile(
    "[Uu]nable to allocate|not enough memory|[Oo]ut of memory|[Cc]annot allocate memory|std::bad_alloc"
    "|Storage size calculation overflowed|Overflow when unpacking long"
)
_SIZE = re.compile(r"allocate ([\d.]+) (bytes|[KMGT]iB)")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def allocation_that_failed(error: Exception) -> int | None:
    """The bytes that an error says could not be allocated, 0 if it does not say how many; None for another error."""
    if not isinstance(error, torch.OutOfMemoryError | MemoryError) and not _OUT_OF_MEMORY.search(str(error)):
        return None
    size = _SIZE.search(str(error))
    return round(float(size[1]) * _UNITS[size[2]]) if size else 0


def _leave(status: int, world: World | None, message: str = "") -> NoReturn:
    """Say why, and exit. With other ranks, without C++'s teardown: a thread of gloo or of the watchdog is sometimes
    still running then, which aborts a job that has completed."""
    message = visible(message)
    if message:
        _print_once(message, world)
    if world is not None and world.watchdog is not None:
        world.watchdog.leave(message)
    if world is None or world.store is None:
        sys.exit(status)
    if status == 0 and dist.is_initialized():
        dist.destroy_process_group()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # it is full or closed, and there is no other place to say so
            status = status or FAILED
    os._exit(status)


def _print_once(message: str, world: World | None) -> None:
    """Print an error on the first rank that meets it; before the ranks have met, on rank 0."""
    if world is None or world.store is None:
        first = os.environ.get("RANK", "0") == "0" or world is None
    else:
        store, key = world.store, "error/" + hashlib.sha256(message.encode()).hexdigest()
        # The store's own process may have gone or been stopped: better twice than never.
        first = within(STORE_SECONDS, lambda: store.add(key, 1) == 1, otherwise=True)
    if first:
        print(f"{world.prefix if world else ''} error: {message}".lstrip(), file=sys.stderr, flush=True)
    _report_to_torchrun(message)


def _report_to_torchrun(message: str) -> None:
    """Leave the message where torchrun looks for it, so that its closing report names the cause."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path and message:
        report = {"message": {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}}
        Path(path).write_text(json.dumps(report))


def _is_lost_peer(error: RuntimeError) -> bool:
    """Whether a collective failed because another process has gone."""
    signs = ("closed by peer", "reset by peer", "Broken pipe", "gloo/transport")
    return isinstance(error, dist.DistBackendError) or any(sign in str(error) for sign in signs)
