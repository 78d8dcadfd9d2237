"""The start and end of a program: exit status, Ctrl-C, and errors in one line on standard error."""

import atexit
import os
import signal
import sys
from pathlib import Path

from megatron_core.terminal import protect_terminal

INTERRUPTED = 130
"""Exit status after Ctrl-C, if there was nothing to save or on the second Ctrl-C."""


def program() -> str:
    """Name of the running program, for messages: ``serve`` of tools/serve.py, ``megatron-serve`` of the command."""
    return Path(sys.argv[0]).stem


def end_at_once() -> None:
    """Let Ctrl-C end the process without a traceback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # SIGINT may be ignored, as under nohup
        signal.signal(signal.SIGINT, _end)


def _end(number: int, frame: object) -> None:
    os._exit(INTERRUPTED)


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
        atexit.register(end_at_once)  # before torch's exit handlers, in which Ctrl-C would print a traceback
