"""Log lines on standard output, and a progress bar on standard error."""

import re
import shutil
import sys
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import TextIO

from tqdm import tqdm

from megatron_core.config.monitor import MonitorConfig
from megatron_core.feature import features
from megatron_core.monitor.events import StepEvent, ValidationEvent
from megatron_core.terminal import colours, exact

WIDTH = 100
"""Maximum columns of a short line."""
_BOLD, _RED, _RESET = "\x1b[1m", "\x1b[31m", "\x1b[0m"


def short_line(events: Sequence[StepEvent], now: datetime) -> str:
    """Return a line of at most ``WIDTH`` columns for the steps since the last line.

    ``norm`` is the gradient norm. ``Feature.shown_losses`` come second: theirs may be the only losses that a run
    trains. Times are means over these steps; the loss is the mean over steps that were not skipped, or over all steps
    if all were skipped. Values for which there is no space, the last ones first, are in the metrics file.
    """
    latest = events[-1]
    skipped, nan = sum(event.skipped for event in events), sum(event.is_nan for event in events)
    losses = {name: f"{name} {_readable(value)}" for name, value in latest.auxiliary_losses.items()}
    always_shown = [name for feature in features() for name in feature.shown_losses]
    milliseconds = mean([event.elapsed_ms for event in events])
    fields = [
        f"{now:%H:%M}  iteration {latest.iteration}/{latest.total_iterations}",
        f"loss {_readable(mean_loss(events))}",
        *(losses.pop(name) for name in always_shown if name in losses),
        *([f"skipped {skipped}"] if skipped else []),
        *([f"nan {nan}"] if nan else []),
        *([] if latest.grad_norm is None else [f"norm {_readable(latest.grad_norm, 3)}"]),
        f"lr {latest.learning_rate:.1e}",
        f"{milliseconds:.1f} ms" if milliseconds < 1e3 else f"{milliseconds / 1e3:.2f} s",
        f"{mean([event.tokens_per_second for event in events]):,.0f} tok/s",
        *([] if (rate := utilisation(events)) is None else [f"util {rate:.0%}"]),
        *_remaining(latest, milliseconds),
        *losses.values(),
        *([] if latest.params_norm is None else [f"params norm {_readable(latest.params_norm, 3)}"]),
    ]
    line = fields[0]
    for text in fields[1:]:
        if len(line) + 2 + len(text) <= WIDTH:
            line += f"  {text}"
    return line


def validation_line(event: ValidationEvent) -> str:
    """Return the short line for an evaluation."""
    if event.accuracy is not None and event.accuracy_norm is not None:
        return accuracy_line(event, event.accuracy, event.accuracy_norm)
    name = "validation loss" if event.split == "validation" else f"validation loss on {event.split} set"
    return f"{name} at iteration {event.iteration}: {_readable(event.loss)}, perplexity {_readable(event.perplexity)}"


def accuracy_line(event: ValidationEvent, accuracy: float, accuracy_norm: float) -> str:
    """Return the line for an evaluation of questions with choices."""
    return (
        f" accuracy at iteration {event.iteration} on {event.split} | acc: {accuracy:.4f} | "
        f"acc_norm: {accuracy_norm:.4f} | loss of the correct choice: {event.loss:.4f} | "
    )


class Summary:
    """The table at the end of a run."""

    def __init__(self) -> None:
        self.steps = self.skipped = 0
        self.evaluated: dict[str, float] = {}
        """The last loss of each evaluated split."""
        self._milliseconds = self._tokens = 0.0
        self._first: StepEvent | None = None
        self._last: StepEvent | None = None

    def add(self, event: StepEvent) -> None:
        """Count a step."""
        self.steps, self.skipped = self.steps + 1, self.skipped + event.skipped
        self._milliseconds += event.elapsed_ms
        self._tokens += event.tokens_per_second * event.elapsed_ms / 1e3
        self._first, self._last = self._first or event, event

    def table(self) -> list[str]:
        """Return the lines of the table; time and speed are those of the steps, without evaluations and saves."""
        first, latest = self._first, self._last
        assert first is not None and latest is not None, "there was a step"
        seconds = self._milliseconds / 1e3
        rows = {
            "steps": f"{self.steps:,}, to iteration {latest.iteration:,} of {latest.total_iterations:,}",
            "skipped steps": str(self.skipped) if self.skipped else "",
            "loss": f"{first.loss:.4f} in the first step, {latest.loss:.4f} in the last",
            **{f"{split} loss": f"{loss:.4f}" for split, loss in self.evaluated.items()},
            "tokens": f"{self._tokens:,.0f} in these steps, {latest.consumed_tokens:,} in all",
            "time of steps": f"{timedelta(seconds=round(seconds))}, {self._milliseconds / self.steps:,.1f} ms each",
            "speed": f"{self._tokens / max(seconds, 1e-9):,.0f} tokens/s",
            "goodput": "" if latest.goodput is None else f"{latest.goodput:.1%}",
            "peak memory": f"{latest.memory_bytes / 2**30:.2f} GiB on this rank" if latest.memory_bytes else "",
        }
        known_rows = {name: value for name, value in rows.items() if value}
        width = max(map(len, known_rows))
        return [f"  {name:<{width}}  {value}" for name, value in known_rows.items()]


class ConsoleSink:
    """Prints a line every ``log_interval`` steps and keeps a progress bar on a terminal.

    The first and the last step also have lines, so that a short run prints something.
    """

    setting = "standard output"
    format_steps: Callable[[Sequence[StepEvent], datetime], str] = staticmethod(short_line)
    """The line for the steps since the last line."""
    format_evaluation: Callable[[ValidationEvent], str] = staticmethod(validation_line)
    """The text for an evaluation."""
    has_table = True
    """Whether a table ends the run."""

    def __init__(
        self,
        log_interval: int,
        *,
        progress: bool = True,
        quiet: bool = False,
        out: TextIO | None = None,
        err: TextIO | None = None,
    ) -> None:
        """``quiet``: only evaluations.

        ``out`` and ``err``: streams of lines and bar, by default those of the process.
        """
        self._interval, self._quiet = log_interval, quiet
        self._out = out or sys.stdout
        self._err = err or sys.stderr
        self._shows_bar = progress and not quiet and self._err.isatty()
        self._bar: tqdm | None = None
        self._pending: list[StepEvent] = []
        self._summary = Summary() if self.has_table and not quiet else None

    @classmethod
    def of(cls, config: MonitorConfig) -> "ConsoleSink":
        """The console of a run."""
        return cls(config.log_interval, progress=config.progress, quiet=config.quiet)

    def on_step(self, event: StepEvent) -> None:
        """Advance the bar, and print a line if it is due."""
        if self._summary is not None:
            self._summary.add(event)
        if not self._quiet:
            self._pending.append(event)
        if self._shows_bar:
            self._advance_bar(event)
        if event.iteration % self._interval == 0 or event.iteration in (1, event.total_iterations):
            self._print_pending()

    def on_validation(self, event: ValidationEvent) -> None:
        """Print the evaluation."""
        if self._summary is not None:
            self._summary.evaluated[event.split] = event.loss
        self._print(self.format_evaluation(event))

    def close(self) -> None:
        """Print the steps without a line and the table, and stop the bar."""
        self._print_pending()
        if self._summary is not None and self._summary.steps:
            self._print("\n".join(self._summary.table()))
        if self._bar is not None:
            self._bar.close()

    def _print_pending(self) -> None:
        if self._pending:
            line = self.format_steps(self._pending, datetime.now())
            if self._out.isatty():
                # Colours only on a terminal: in a file they would be codes between the words.
                line = _coloured(line, alarming=any(event.skipped or event.is_nan for event in self._pending))
            with colours():
                self._print(line)
            self._pending = []

    def _print(self, text: str) -> None:
        if self._bar is not None:
            self._bar.clear()
        print(text, file=self._out, flush=True)
        if self._bar is not None:
            self._bar.refresh()

    def _advance_bar(self, event: StepEvent) -> None:
        if self._bar is None:  # created at the first step, which has the number of earlier steps
            self._bar = tqdm(
                total=event.total_iterations,
                initial=event.iteration - 1,
                file=exact(self._err),
                unit="step",
                # For a terminal of unknown width, reported as 0, tqdm would draw nothing.
                ncols=shutil.get_terminal_size(fallback=(100, 24)).columns,
                bar_format="{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}  {desc}  [{remaining} left]",
            )
        self._bar.set_description_str(
            f"loss {event.loss:.4f}  lr {event.learning_rate:.2e}  {event.tokens_per_second:,.0f} tokens/s",
            refresh=False,
        )
        self._bar.update()


def _coloured(line: str, *, alarming: bool) -> str:
    """Return a line with a bold loss, or in red if a step was skipped or its loss is not finite."""
    if alarming:
        return f"{_RED}{line}{_RESET}"
    return re.sub(r"(lm )?loss:? \S+", lambda match: f"{_BOLD}{match[0]}{_RESET}", line, count=1)


def mean_loss(events: Sequence[StepEvent]) -> float:
    """Return the mean loss of the steps that were not skipped, or of all steps if all were."""
    return mean([event.loss for event in events if not event.skipped] or [event.loss for event in events])


def _remaining(latest: StepEvent, milliseconds: float) -> list[str]:
    """Time to the last iteration, except after the first step, which takes longer: it allocates memory."""
    seconds = (latest.total_iterations - latest.iteration) * milliseconds / 1e3
    if seconds < 1 or latest.iteration == 1:
        return []
    for unit, size in (("days", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return [f"{seconds / size:.{0 if unit == 'min' else 1}f} {unit} left"]
    return [f"{seconds:.0f} s left"]


def utilisation(events: Sequence[StepEvent]) -> float | None:
    """Model FLOP/s / FLOP/s of matrix products on the reporting rank, if known."""
    rate = events[-1].product_rate
    return mean([event.model_flops_per_second for event in events]) / rate if rate else None


def mean(values: Sequence[float]) -> float:
    """The mean; NaN if any value is NaN."""
    return sum(values) / len(values)


def _readable(value: float, digits: int = 4) -> str:
    """``digits`` digits after the point, with an exponent for very small and large numbers."""
    return f"{value:.{digits}f}" if value == 0 or 0.1 <= abs(value) < 1e5 else f"{value:.3e}"
