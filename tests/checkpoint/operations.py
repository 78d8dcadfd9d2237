"""Observes changes of files by this process, from Python's audit events, and kills processes between them."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Observer = Callable[[str, str], None]
CHANGES = {"open", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.truncate", "os.link", "ctypes.call_function"}
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_OBSERVERS: list[Observer] = []
_INSTALLED: list[bool] = []


@contextmanager
def file_operations(observer: Observer) -> Iterator[None]:
    """Call ``observer(event, path)`` before each change of a file or folder."""
    if not _INSTALLED:
        sys.addaudithook(_observe)  # cannot be removed
        _INSTALLED.append(True)
    _OBSERVERS.append(observer)
    try:
        yield
    finally:
        _OBSERVERS.remove(observer)


def _observe(event: str, arguments: tuple[object, ...]) -> None:
    if not _OBSERVERS or event not in CHANGES:
        return
    if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & _WRITES):
        return
    for observer in tuple(_OBSERVERS):
        observer(event, str(arguments[0]))


def killed_before(number: int, action: Callable[[], object]) -> bool:
    """Run ``action`` in a forked process that is killed before its file operation ``number``; False if it completed."""
    process = os.fork()
    if process == 0:
        status = 1
        try:
            left = [number]

            def count(event: str, path: str) -> None:
                left[0] -= 1
                if left[0] < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

            with file_operations(count):
                action()
            status = 0
        finally:
            os._exit(status)
    _, ended = os.waitpid(process, 0)
    assert ended in (0, signal.SIGKILL), "the action failed"
    return ended != 0
