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
        metrics: Metrics files of runs (metrics.jsonl); each one is a curve.
        out: Picture to write.
        x: What runs along the x axis.
        title: Words above the picture.
    """
    if not metrics:
        print("plot_metrics.py: no metrics file; give one or more metrics.jsonl", file=sys.stderr)
        return 2
    try:
        plot_loss(metrics, out, x=x, title=title)
    except (MegatronError, OSError, ValueError) as error:  # matplotlib names the picture formats that it knows
        print(f"plot_metrics.py: {error}", file=sys.stderr)
        return 1
    print(f"wrote {out}")
    return 0


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
