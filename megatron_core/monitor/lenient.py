"""Reports that cannot be written any more, as on a full disk: one warning, and the training goes on without them."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

from megatron_core.command import discard
from megatron_core.monitor.events import Sink, StepEvent, ValidationEvent


class LenientSink:
    """Passes events on to ``sink``; warns once when it cannot write, and tries again with each event."""

    def __init__(self, sink: Sink) -> None:
        self._sink, self._is_told = sink, False
        self.setting = sink.setting

    def on_step(self, event: StepEvent) -> None:
        """Pass on one step."""
        self._try(lambda: self._sink.on_step(event))

    def on_validation(self, event: ValidationEvent) -> None:
        """Pass on one evaluation."""
        self._try(lambda: self._sink.on_validation(event))

    def close(self) -> None:
        """Close it."""
        self._try(self._sink.close)

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
        except OSError as error:
            if not self._is_told:
                tell_unwritable(self.setting, error)
            self._is_told = True


@contextmanager
def lenient_output() -> Iterator[None]:
    """Standard output for a training, which it survives if that becomes full or is closed."""
    strict = sys.stdout
    sys.stdout = cast(TextIO, _Stream(strict))
    try:
        yield
    finally:
        sys.stdout = strict


class _Stream:
    """A text stream that swallows what cannot be written."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write ``text``."""
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        """Bring it to where it belongs."""
        self._try(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _try(self, action: Callable[[], object]) -> None:
        try:
            action()
        except OSError as error:
            discard(self._stream)
            tell_unwritable("standard output", error)


def tell_unwritable(what: str, error: OSError) -> None:
    """Warn on standard error that ``what`` is not written."""
    with suppress(OSError):
        print(f"note: {what} CANNOT BE WRITTEN: {error.strerror}; the training goes on", file=sys.stderr, flush=True)
