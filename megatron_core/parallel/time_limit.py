"""Actions that use the store, which may not answer."""

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

Result = TypeVar("Result")


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
