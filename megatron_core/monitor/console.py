"""Log lines in Megatron-LM's format on standard output, and a progress bar on standard error."""

import math
import shutil
import sys
from collections.abc import Sequence
from datetime import datetime
from typing import TextIO

from tqdm import tqdm

from megatron_core.monitor.events import StepEvent, ValidationEvent
from megatron_core.terminal import exact

LARGEST_SHARES = 4
"""Maximum number of phases in a line."""


def step_line(events: Sequence[StepEvent], now: datetime) -> str:
    """Megatron-LM's line for the steps since the last line.

    Loss and times are means over these steps; the loss is the mean over steps that were not skipped, or over all steps
    if all were skipped. Other values are of the last step. Unlike Megatron-LM's line, it shows a NaN or negative loss,
    tokens per second, and throughput below 1 TFLOP/s in GFLOP/s.
    """
    last = events[-1]
    losses = [event.loss for event in events if not event.skipped] or [event.loss for event in events]
    fields = [
        f" [{now.strftime('%Y-%m-%d %H:%M:%S.%f')}] iteration {last.iteration:8d}/{last.total_iterations:8d}",
        f"consumed samples: {last.consumed_samples:12d}",
        f"elapsed time per iteration (ms): {_mean([event.elapsed_ms for event in events]):.1f}",
        _throughput(_mean([event.model_flops_per_second for event in events])),
        f"tokens per second: {_digits(_mean([event.tokens_per_second for event in events]))}",
        *_shares(events),
        f"learning rate: {last.learning_rate:.6E}",
        f"global batch size: {last.global_batch_size:5d}",
        f"lm loss: {_scientific(_mean(losses))}",
        *(f"{name}: {_scientific(value)}" for name, value in last.auxiliary_losses.items()),
        f"loss scale: {last.loss_scale:.1f}",
        *([] if last.grad_norm is None else [f"grad norm: {last.grad_norm:.3f}"]),
        *([] if last.num_zeros_in_grad is None else [f"num zeros: {last.num_zeros_in_grad}"]),
        *([] if last.params_norm is None else [f"params norm: {last.params_norm:.3f}"]),
        f"number of skipped iterations: {sum(event.skipped for event in events):3d}",
        f"number of nan iterations: {sum(event.is_nan for event in events):3d}",
    ]
    return " | ".join(fields) + " |"


def validation_block(event: ValidationEvent) -> str:
    """Megatron-LM's three lines for an evaluation."""
    where = "" if event.split == "validation" else f" on {event.split} set"
    line = (
        f" validation loss at iteration {event.iteration}{where} | "
        f"lm loss value: {_scientific(event.loss)} | "
        f"lm loss PPL: {_scientific(event.perplexity)} | "
    )
    rule = "-" * (len(line) + 1)
    return f"{rule}\n{line}\n{rule}"


class ConsoleSink:
    """Prints a line every ``log_interval`` steps and keeps a progress bar on a terminal.

    The first and the last step also have lines, so that a short run prints something.
    """

    setting = "standard output"

    def __init__(
        self, log_interval: int, *, progress: bool = True, out: TextIO | None = None, err: TextIO | None = None
    ) -> None:
        """``out`` and ``err``: streams of lines and bar, by default those of the process."""
        self._interval = log_interval
        self._out = out or sys.stdout
        self._err = err or sys.stderr
        self._shows_bar = progress and self._err.isatty()
        self._bar: tqdm | None = None
        self._pending: list[StepEvent] = []

    def on_step(self, event: StepEvent) -> None:
        """Advance the bar, and print a line if it is due."""
        self._pending.append(event)
        if self._shows_bar:
            self._advance_bar(event)
        if event.iteration % self._interval == 0 or event.iteration in (1, event.total_iterations):
            self._print_pending()

    def on_validation(self, event: ValidationEvent) -> None:
        """Print the evaluation's block."""
        self._print(validation_block(event))

    def close(self) -> None:
        """Print the steps without a line, and stop the bar."""
        self._print_pending()
        if self._bar is not None:
            self._bar.close()

    def _print_pending(self) -> None:
        if self._pending:
            self._print(step_line(self._pending, datetime.now()))
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


def _shares(events: Sequence[StepEvent]) -> list[str]:
    """Utilisation, goodput, and the largest shares of the reporting rank's time, if known."""
    last, fields = events[-1], []
    if last.product_rate:
        rate = _mean([event.model_flops_per_second for event in events]) / last.product_rate
        fields.append(f"utilisation: {rate:.1%}")
    if last.goodput is not None:
        fields.append(f"goodput: {last.goodput:.1%}")
    total: dict[str, float] = {}
    for event in events:
        for name, seconds in event.phases.items():
            total[name] = total.get(name, 0.0) + seconds
    whole = sum(total.values())
    largest = sorted(total, key=lambda name: -total[name])[:LARGEST_SHARES] if whole else []
    if largest:
        fields.append("time: " + ", ".join(f"{name} {total[name] / whole:.1%}" for name in largest))
    return fields


def _throughput(flops: float) -> str:
    """Model FLOP/s of a rank in TFLOP/s, or GFLOP/s below 1 TFLOP/s."""
    unit, size = ("TFLOP/s", 1e12) if flops >= 1e12 else ("GFLOP/s", 1e9)
    return f"throughput per GPU ({unit}/GPU): {_digits(flops / size)}"


def _digits(value: float) -> str:
    """Format with at least three significant digits and no exponent."""
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}" if value > 0 else "0.00"


def _mean(values: Sequence[float]) -> float:
    """The mean; NaN if any value is NaN."""
    return sum(values) / len(values)


def _scientific(value: float) -> str:
    """Megatron-LM's format of a loss; ``nan`` and ``inf`` in lower case."""
    return f"{value:.6E}" if math.isfinite(value) else str(value)
