"""Reports whose destination fails, for example a full disk: print one warning and continue training."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

from megatron_core.command import discard
from megatron_core.monitor.events import Sink, StepEvent, ValidationEvent


class LenientSink:
    """Passes events to ``sink``; warns at the first failed write, and tries again with each event."""

    def __init__(self, sink: Sink) -> None:
        self._sink, self._has_warned = sink, False
        self.setting = sink.setting

    def on_step(self, event: StepEvent) -> None:
        """Pass one step."""
        self._try(lambda: self._sink.on_step(event))

    def on_validation(self, event: ValidationEvent) -> None:
        """Pass one evaluation."""
        self._try(lambda: self._sink.on_validation(event))

    def close(self) -> None:
        """Close the sink."""
        self._try(self._sink.close)

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
        except OSError as error:
            if not self._has_warned:
                warn_unwritable(self.setting, error)
            self._has_warned = True


@contextmanager
def lenient_output() -> Iterator[None]:
    """Let training continue in this context if standard output is full or closed."""
    # print() raises if the disk of a log file is full; hours of training are worth more than its lines.
    strict = sys.stdout
    sys.stdout = cast(TextIO, _Stream(strict))
    try:
        yield
    finally:
        sys.stdout = strict


class _Stream:
    """A text stream that discards output after a failed write."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write ``text``."""
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        """Flush the stream."""
        self._try(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _try(self, action: Callable[[], object]) -> None:
        try:
            action()
        except OSError as error:
            discard(self._stream)
            warn_unwritable("standard output", error)


def warn_unwritable(name: str, error: OSError) -> None:
    """Warn on standard error that ``name`` is not written."""
    with suppress(OSError):
        print(f"note: {name} cannot be written: {error.strerror}; training continues", file=sys.stderr, flush=True)
