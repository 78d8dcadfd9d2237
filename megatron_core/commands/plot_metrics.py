"""Draw the loss curves of runs: ``megatron-plot-metrics runs/a/metrics.jsonl --out loss.png``."""

from megatron_core.commands.start import start, status_of

if __name__ == "__main__":
    start("plot_metrics")

import sys
from typing import Annotated, Literal

import tyro

from megatron_core.command import program
from megatron_core.prepared_output import picture_kind, prepare_output
from megatron_core.reports.plot import plot_expert_load, plot_loss
from megatron_core.terminal import parse_flags


def plot(
    metrics: Annotated[tuple[str, ...], tyro.conf.Positional],
    /,
    out: str = "loss.png",
    x: Literal["iteration", "tokens"] = "iteration",
    title: str | None = None,
    experts: bool = False,
) -> int:
    """Draw training loss, validation loss and learning rate, or the load of the experts.

    Args:
        metrics: Metrics files of runs (metrics.jsonl), one curve each.
        out: Picture to write (.png, .svg or .pdf).
        x: Quantity on the x axis.
        title: Title of the picture.
        experts: Draw a heat map of the load of one run's experts instead of its loss.
    """
    if experts and len(metrics) > 1:
        print(f"{program()}: --experts draws a single run; give one metrics.jsonl", file=sys.stderr)
        return 2
    if not metrics:
        print(f"{program()}: no metrics file was given; give one or more metrics.jsonl", file=sys.stderr)
        return 2

    def draw() -> None:
        prepare_output({"out": out, "metrics": metrics}, "out", picture_kind(out))
        if experts:
            plot_expert_load(metrics[0], out, title=title or "Load of the experts")
        else:
            plot_loss(metrics, out, x=x, title=title or "Loss")
        print(f"wrote {out}")

    return status_of(draw)


def main() -> int:
    """Parse the flags and draw; 1 if a file cannot be read or written."""
    return parse_flags(plot)
