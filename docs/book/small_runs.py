"""Small training runs for the chapters, and the pictures and tables in which they show them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megatron_core.config import RunConfig
from megatron_core.config.validate import check
from megatron_core.reports.memory_report import KeptForBackward
from megatron_core.reports.meter import METER
from megatron_core.training.setup import Run, set_up
from megatron_core.training.step import train_step
from megatron_core.verify import run_ranks, this_world

torch.set_num_threads(1)  # threads of OpenMP would make the ranks hang, which are forked from this process

SMALL = {
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "seq_length": 64,
    "vocab_size": 256,
    "mock_data": True,
    "micro_batch_size": 2,
    "global_batch_size": 8,
    "train_iters": 100,
    "lr": 3e-3,
    "fp64": True,
}
"""Settings of all chapters, with the names of the flags of pretrain_gpt.py."""


@dataclass(frozen=True)
class Rank:
    """Measurements of one rank in a training of several steps."""

    losses: list[float]
    """Loss of each step."""
    sent: dict[str, float]
    """Bytes sent in a step, by group and collective, such as ``dp all_reduce``."""
    calls: dict[str, float]
    """Calls in a step, with the same keys."""
    state: dict[str, int]
    """Bytes of weights, gradients and optimizer state after the last step."""
    activations: int
    """Largest number of bytes that autograd kept for backward."""
    seconds: float
    """Time of a step."""


def start(**settings: Any) -> Run:
    """Set up a run on this rank: the small model with other settings."""
    config, world = RunConfig.from_flat(SMALL | settings), this_world()
    check(config, world.size)
    return set_up(config, world)


def train_rank(steps: int, settings: dict[str, Any]) -> Rank:
    """Train on this rank and measure it."""
    run = start(**settings)
    kept = KeptForBackward(run)
    METER.start(run.groups, run.world.device)
    with kept.watching():
        losses = [train_step(run).loss for _ in range(steps)]
    times = METER.take()
    return Rank(
        losses=losses,
        sent={name: traffic.bytes / steps for name, traffic in times.traffic.items()},
        calls={name: traffic.calls / steps for name, traffic in times.traffic.items()},
        state=run.state_bytes(),
        activations=kept.peak,
        seconds=times.seconds / steps,
    )


def train(ranks: int = 1, steps: int = 3, **settings: Any) -> list[Rank]:
    """Train the small model on ``ranks`` processes of this machine; returns their measurements."""
    return run_ranks(ranks, train_rank, steps, settings)


def print_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print rows below a header; the first column is aligned left, the others right."""
    cells = [[str(cell) for cell in row] for row in [header, *rows]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for first, *others in cells:
        line = [first.ljust(widths[0])] + [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        print("  ".join(line).rstrip())


def kib(size: float) -> str:
    """Bytes in KiB."""
    return f"{size / 1024:,.1f} KiB"


@dataclass
class Pictures:
    """The pictures of a chapter: files in ``folder``, and those that the page does not show yet."""

    folder: Path = Path("runs/book")
    waiting: list[tuple[str, str]] | None = None
    """Names and descriptions for the builder of the page; None if a reader runs the chapter."""

    def path(self, name: str, description: str) -> Path:
        """The file of a new picture; ``name`` has a suffix."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / name
        if self.waiting is None:
            print(f"picture: {path}")
        else:
            self.waiting.append((path.name, description))
        return path


PICTURES = Pictures()
# Text stays text, and equal pictures are equal files.
rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "book", "font.size": 9})
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#e69f00", "#56b4e9", "#cc79a7")
"""Okabe and Ito's colours for colour-blind readers."""


def new_figure(x: str, y: str, *, height: float = 3.0) -> tuple[Figure, Axes]:
    """A figure with labelled axes."""
    figure = Figure(figsize=(7.0, height), layout="constrained", facecolor="white")
    axes = figure.subplots()
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def save(figure: Figure, name: str, description: str) -> None:
    """Save a figure as a picture of this chapter."""
    if figure.axes[0].get_legend_handles_labels()[0]:
        figure.axes[0].legend(frameon=False)
    figure.savefig(PICTURES.path(f"{name}.svg", description), metadata={"Date": None, "Creator": None})
