"""The start and end of a program: exit status, Ctrl-C, and errors in one line on standard error."""

from __future__ import annotations

import atexit
import os
import signal
import sys
from pathlib import Path
from types import TracebackType

from megatron_core.terminal import protect_terminal

INTERRUPTED = 130
"""Exit status after Ctrl-C, if there was nothing to save or on the second Ctrl-C."""


def program() -> str:
    """Name of the running program, for messages: ``serve`` of tools/serve.py, ``megatron-serve`` of the command."""
    return Path(sys.argv[0]).stem


def end_on_interrupt() -> None:
    """Until ``begin_program``, let Ctrl-C and libraries that cannot be loaded end the process without a traceback."""
    sys.excepthook = _say_what_is_missing
    _end_at_once()


def _end_at_once() -> None:
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # SIGINT may be ignored, as under nohup
        signal.signal(signal.SIGINT, _end)


def _end(number: int, frame: object) -> None:
    os._exit(INTERRUPTED)


def _say_what_is_missing(error_type: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not issubclass(error_type, ImportError | MemoryError | OSError | SystemError):
        sys.__excepthook__(error_type, error, trace)
        return
    print(
        f"{program()}: a library cannot be loaded: {str(error) or error_type.__name__}; install it, or "
        "allow more memory (ulimit -v): torch takes about 1 GiB",
        file=sys.stderr,
    )


def begin_program() -> None:
    """Restore ``KeyboardInterrupt`` for Ctrl-C, escape control characters on terminals, and discard output to a stream
    that was closed before the start (``>&-``)."""
    sys.excepthook = sys.__excepthook__
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 (open as long as the process)
    protect_terminal()
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        atexit.register(_end_at_once)  # before torch's exit handlers, in which Ctrl-C would print a traceback
