"""Time limits of groups and of the watchdog, and of actions that use the store, which may not answer."""

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

Result = TypeVar("Result")
FATAL = frozenset({"nccl"})
"""Backends that abort the process (SIGABRT) if a collective exceeds the limit of its group; others raise an error."""
GROUP_FACTOR = 1.5
"""Limit of a group of a fatal backend / limit of the watchdog."""
GROUP_MARGIN = 10.0
"""Least seconds between both: the watchdog polls, collects the answers of all ranks and prints its report."""
SLACK = 1.25
"""Limit of the watchdog / limit of a group of another backend, whose errors come earlier and are more specific."""


def group_limit(backend: str, limit: float) -> float:
    """Seconds after which a group's collective fails, for a ``limit`` of --distributed-timeout-minutes."""
    # NCCL's thread aborts the process, and Python code no longer runs: the report must be printed before that.
    return max(GROUP_FACTOR * limit, limit + GROUP_MARGIN) if backend in FATAL else limit


def watchdog_limit(backend: str, limit: float) -> float:
    """Seconds without progress after which the watchdog reports a rank, for the same ``limit``."""
    return limit if backend in FATAL else SLACK * limit


def set_nccl_limits(limit: float) -> None:
    """Set torch's variables of NCCL's threads for groups with this limit in seconds, unless they are set."""
    # 3: end the process if a collective fails, without ncclCommAbort, which may hang as well.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    # Seconds after which torch ends a process whose NCCL thread itself hangs: 8 minutes by default, before the report.
    os.environ.setdefault("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", str(int(limit) + 60))


def within(seconds: float, action: Callable[[], Result], otherwise: Result) -> Result:
    """Run ``action``; returns ``otherwise`` if it fails or takes longer than ``seconds`` (it then continues in a
    thread)."""
    # A thread, because calls of torch's store have time limits of minutes and cannot be interrupted.
    results: list[Result] = []
    start_thread(lambda: results.append(action())).join(seconds)
    return results[0] if results else otherwise


def start_thread(action: Callable[[], None]) -> threading.Thread:
    """Run ``action``, which uses the store and may fail, in a thread."""

    def run() -> None:
        with suppress(RuntimeError, OSError, ValueError):
            action()

    # A daemon: a call that never returns must not keep the process from ending.
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread
