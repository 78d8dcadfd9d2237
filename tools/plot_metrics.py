"""Draw the loss curves of runs: ``python tools/plot_metrics.py runs/a/metrics.jsonl --out loss.png``."""

from __future__ import annotations

import sys
from typing import Annotated, Literal

import tyro

from megatron_core.errors import MegatronError
from megatron_core.monitor.plot import plot_loss


def main(
    metrics: Annotated[tuple[str, ...], tyro.conf.Positional],
    /,
    out: str = "loss.png",
    x: Literal["iteration", "tokens"] = "iteration",
    title: str = "Loss",
) -> int:
    """Draw training loss, validation loss and learning rate.

    Args:
        metrics: Metrics files of runs (metrics.jsonl), one curve for each.
        out: Picture to write (.png, .svg or .pdf).
        x: Quantity on the x axis.
        title: Title of the picture.
    """
    if not metrics:
        print("plot_metrics.py: no metrics file; give one or more metrics.jsonl", file=sys.stderr)
        return 2
    try:
        plot_loss(metrics, out, x=x, title=title)
    except (MegatronError, OSError, ValueError) as error:  # ValueError: unknown picture format
        print(f"plot_metrics.py: {error}", file=sys.stderr)
        return 1
    print(f"wrote {out}")
    return 0


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
