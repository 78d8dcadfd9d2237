"""Messages of a run: the backend, the progress, and the summary."""

import sys
import time
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from megatron_core.preprocess.output import OutputState
from megatron_core.terminal import exact

# Interval without a terminal, so that a log file does not get a line every half second.
LINE_SECONDS = 10.0
BAR_SECONDS = 0.5


def progress_of_bytes(total: int, **options: Any) -> Any:
    """A bar on standard error, which is shown on a terminal only."""
    shown = sys.stderr.isatty()
    return tqdm(total=total, unit="B", unit_scale=True, file=exact(sys.stderr), disable=not shown, **options)


class IntervalTimer:
    """Timer that fires at most once per number of seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._last = time.monotonic()

    def passed(self) -> bool:
        """Whether the interval has passed since the last call that returned True; restarts the timer."""
        now = time.monotonic()
        if now - self._last < self._seconds:
            return False
        self._last = now
        return True


class JobProgress:
    """Shows MB/s, documents, tokens and the remaining time: a bar on a terminal, otherwise a line every 10 seconds.

    total: bytes of the input files on disk. done: bytes already processed by an earlier run.
    """

    def __init__(self, total: int, done: int, log_interval: int) -> None:
        self._total = total
        self._start_done = done
        self._interval = log_interval
        self._start = time.monotonic()
        self._start_documents = -1
        self._next = 0
        self._line = IntervalTimer(LINE_SECONDS)
        # Disable tqdm's monitor thread, which only checks for stalled bars.
        tqdm.monitor_interval = 0
        self._bar = progress_of_bytes(total, initial=done, mininterval=BAR_SECONDS)

    def update(self, done: int, documents: int, tokens: int) -> None:
        """Show the number of processed bytes, documents and tokens."""
        self._start_documents = documents if self._start_documents < 0 else self._start_documents
        seconds = max(1e-9, time.monotonic() - self._start)
        rate = f"{(documents - self._start_documents) / seconds:,.0f} documents/s"
        if self._bar.disable:
            if self._line.passed():
                speed = (done - self._start_done) / seconds
                left = tqdm.format_interval((self._total - done) / speed) if speed else "?"
                counts = f"{documents:,} documents, {tokens:,} tokens, {speed / 1e6:.1f} MB/s, {rate}, {left} left"
                print(f"{done / max(1, self._total):.1%}: {counts}", file=sys.stderr, flush=True)
            return
        if documents >= self._next:
            self._next = documents + self._interval
            self._bar.set_postfix_str(f"{documents:,} documents, {rate}, {tokens:,} tokens", refresh=False)
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        """Close the bar."""
        self._bar.close()


def backend_sentence(name: str, reason: str, workers: int) -> str:
    """Name the backend and the number of workers, and the reason if the faster backend is not used."""
    why = f" ({reason})" if reason else ""
    return f"tokenization backend: {name}{why}, {workers} worker{'s' if workers > 1 else ''}"


def counted(number: int, thing: str) -> str:
    """Format a count with its noun, such as "1 broken document" and "2,000 broken documents"."""
    return f"{number:,} {thing}{'s' * (number != 1)}"


def summary_lines(
    prefixes: Sequence[str], state: OutputState, seconds: float, resumed: int, name: str, remarks: Any
) -> list[str]:
    """Return the last lines of a finished run's output.

    seconds: duration of this run. resumed: bytes of text processed by an earlier run.
    """
    lines = [
        f"{prefix}: {extent.documents:,} documents, {extent.tokens:,} tokens"
        for prefix, extent in zip(prefixes, state.extents, strict=True)
    ]
    size = state.size - resumed
    lines.append(
        f"{state.documents:,} documents, {sum(extent.tokens for extent in state.extents):,} tokens, "
        f"{state.size / 1e6:,.1f} MB; {size / 1e6:,.1f} MB in {seconds:.3g} s, {size / seconds / 1e6:,.1f} MB/s, "
        f"by {name}"
    )
    if state.dropped:
        lines.append(
            f"{state.dropped:,} bytes of text omitted: the tokenizer has no token for them, and the text around them "
            "is joined"
        )
    if state.broken or state.empty or state.damaged:
        damaged = f"{counted(state.damaged, 'damaged file')} and " if state.damaged else ""
        broken = counted(state.broken, "broken document")
        empty = counted(state.empty, "empty text")
        lines.append(f"{damaged}{broken} omitted, {empty} kept; all listed in {remarks}")
    return lines
