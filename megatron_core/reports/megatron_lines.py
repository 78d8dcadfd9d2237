"""Log lines in Megatron-LM's format (``--log-format megatron``)."""

import math
from collections.abc import Sequence
from datetime import datetime

from megatron_core.monitor.console import ConsoleSink, accuracy_line, mean, mean_loss, utilisation
from megatron_core.monitor.events import StepEvent, ValidationEvent
from megatron_core.monitor.sinks import SinkContext

LARGEST_SHARES = 4
"""Maximum number of phases in a line."""


def step_line(events: Sequence[StepEvent], now: datetime) -> str:
    """Megatron-LM's line for the steps since the last line.

    Loss and times are means over these steps; the loss is the mean over steps that were not skipped, or over all steps
    if all were skipped. Other values are of the last step. Unlike Megatron-LM's line, it shows a NaN or negative loss,
    tokens per second, and throughput below 1 TFLOP/s in GFLOP/s.
    """
    latest = events[-1]
    fields = [
        f" [{now.strftime('%Y-%m-%d %H:%M:%S.%f')}] iteration {latest.iteration:8d}/{latest.total_iterations:8d}",
        f"consumed samples: {latest.consumed_samples:12d}",
        f"elapsed time per iteration (ms): {mean([event.elapsed_ms for event in events]):.1f}",
        _throughput(mean([event.model_flops_per_second for event in events])),
        f"tokens per second: {_digits(mean([event.tokens_per_second for event in events]))}",
        *_shares(events),
        f"learning rate: {latest.learning_rate:.6E}",
        f"global batch size: {latest.global_batch_size:5d}",
        f"lm loss: {_scientific(mean_loss(events))}",
        *(f"{name}: {_scientific(value)}" for name, value in latest.auxiliary_losses.items()),
        f"loss scale: {latest.loss_scale:.1f}",
        *([] if latest.grad_norm is None else [f"grad norm: {latest.grad_norm:.3f}"]),
        *([] if latest.num_zeros_in_grad is None else [f"num zeros: {latest.num_zeros_in_grad}"]),
        *([] if latest.params_norm is None else [f"params norm: {latest.params_norm:.3f}"]),
        f"number of skipped iterations: {sum(event.skipped for event in events):3d}",
        f"number of nan iterations: {sum(event.is_nan for event in events):3d}",
    ]
    return " | ".join(fields) + " |"


def megatron_validation_line(event: ValidationEvent) -> str:
    """Return Megatron-LM's line for an evaluation."""
    where = "" if event.split == "validation" else f" on {event.split} set"
    if event.accuracy is not None and event.accuracy_norm is not None:
        return accuracy_line(event, event.accuracy, event.accuracy_norm)
    return (
        f" validation loss at iteration {event.iteration}{where} | "
        f"lm loss value: {_scientific(event.loss)} | lm loss PPL: {_scientific(event.perplexity)} | "
    )


def validation_block(event: ValidationEvent) -> str:
    """Megatron-LM's three lines for an evaluation."""
    line = megatron_validation_line(event)
    rule = "-" * (len(line) + 1)
    return f"{rule}\n{line}\n{rule}"


class MegatronConsole(ConsoleSink):
    """Megatron-LM's lines, without a table at the end."""

    format_steps = staticmethod(step_line)
    format_evaluation = staticmethod(validation_block)
    has_table = False


def open_console(context: SinkContext) -> ConsoleSink:
    """The console of a run."""
    return MegatronConsole.of(context.config.monitor)


def _shares(events: Sequence[StepEvent]) -> list[str]:
    """Utilisation, goodput, and the largest shares of the reporting rank's time, if known."""
    latest, fields = events[-1], []
    if (rate := utilisation(events)) is not None:
        fields.append(f"utilisation: {rate:.1%}")
    if latest.goodput is not None:
        fields.append(f"goodput: {latest.goodput:.1%}")
    total: dict[str, float] = {}
    for event in events:
        for name, seconds in event.phases.items():
            total[name] = total.get(name, 0.0) + seconds
    all_seconds = sum(total.values())
    largest = sorted(total, key=lambda name: -total[name])[:LARGEST_SHARES] if all_seconds else []
    if largest:
        fields.append("time: " + ", ".join(f"{name} {total[name] / all_seconds:.1%}" for name in largest))
    return fields


def _throughput(flops: float) -> str:
    """Model FLOP/s of a rank in TFLOP/s, or GFLOP/s below 1 TFLOP/s."""
    unit, size = ("TFLOP/s", 1e12) if flops >= 1e12 else ("GFLOP/s", 1e9)
    return f"throughput per GPU ({unit}/GPU): {_digits(flops / size)}"


def _digits(value: float) -> str:
    """Format with at least three significant digits and no exponent."""
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}" if value > 0 else "0.00"


def _scientific(value: float) -> str:
    """Megatron-LM's format of a loss; ``nan`` and ``inf`` in lower case."""
    return f"{value:.6E}" if math.isfinite(value) else str(value)
