"""Safe output on terminals: control characters in names and texts from files and models are escaped."""

import io
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, TextIO

from megatron_core.errors import CONTROL, escaped, visible

PRINT_COMPLETION = "--tyro-print-completion"
"""tyro's flag for a script that completes a program's flags in a shell; its value is bash, zsh or tcsh."""
_COLOURED = re.compile(rf"\x1b\[[0-9;]*m|{CONTROL.pattern}")


class Terminal(io.TextIOWrapper):
    """A text stream to a terminal that escapes control characters other than newline and tab."""

    def __init__(self, stream: io.TextIOWrapper) -> None:
        """Write to the buffer of ``stream``, which remains usable."""
        super().__init__(stream.buffer, stream.encoding, "backslashreplace", line_buffering=True)
        self.exact = stream
        """The stream without escaping."""
        self.has_colours = False
        """Whether colours are written as they are; see ``colours``."""

    def write(self, text: str) -> int:
        """Write ``text``, escaped."""
        if self.has_colours:
            safe = _COLOURED.sub(lambda match: match[0] if len(match[0]) > 1 else escaped(match), text)
        else:
            safe = visible(text)
        super().write(safe)
        return len(text)


def protect_terminal() -> None:
    """Escape control characters in standard output and standard error if they are terminals.

    Elsewhere text is written unchanged. Both accept file names with invalid UTF-8.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and not isinstance(stream, Terminal):
            stream.reconfigure(errors="backslashreplace")
            if stream.isatty():
                setattr(sys, name, Terminal(stream))


def discard(stream: TextIO) -> None:
    """Discard buffered and future output to ``stream``."""
    with suppress(OSError, ValueError):  # a stream in memory has no descriptor
        if stream.fileno() in (1, 2):  # output to another file must not be lost
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)


def exact(stream: TextIO) -> TextIO:
    """``stream`` without escaping, for progress bars, which move the cursor."""
    return getattr(stream, "exact", stream)


@contextmanager
def colours() -> Iterator[None]:
    """Allow colours on terminals; other control characters remain escaped."""
    streams = [stream for stream in (sys.stdout, sys.stderr) if isinstance(stream, Terminal)]
    for stream in streams:
        stream.has_colours = True
    try:
        yield
    finally:
        for stream in streams:
            stream.has_colours = False


def parse_flags(kind: Callable[..., Any], **options: Any) -> Any:
    """``tyro.cli`` with colours in its help."""
    import tyro  # imported here: it takes 0.1 s, which programs without flags save

    with colours():
        return tyro.cli(kind, **options)


@cache
def print_once(sentence: str) -> None:
    """Print a sentence on stderr once per process."""
    print(sentence, file=sys.stderr, flush=True)
