"""Plot loss curves: training, validation, learning rate and changes of layout."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megatron_core.errors import DataError
from megatron_core.monitor.jsonl import read_metrics
from megatron_core.output_file import save_picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

XAxis = Literal["iteration", "tokens"]
Record = dict[str, Any]

_COLOURS = ("#2563eb", "#dc7a1e", "#12876f", "#a3348f", "#6b7280", "#b3261e")
_MARKERS = "osD^v"
_INK = "#1f2937"
_GREY = "#6b7280"
# A curve with at least this number of steps is drawn twice: each step pale, and the mean over 1/50 of the curve bold.
_SMOOTH_FROM = 200


def plot_loss(
    paths: str | Path | Sequence[str | Path], png_path: str | Path, *, x: XAxis = "iteration", title: str = "Loss"
) -> None:
    """Draw the metrics files ``paths``, one training each, into ``png_path``.

    The upper panel has the training loss as a line and validation losses as points, the small lower panel the learning
    rate. A dotted line marks each change of layout. Steps repeated by a resumed run are drawn once; a loss that is not
    finite leaves a gap with a cross at the top.
    """
    files = [Path(paths)] if isinstance(paths, str | Path) else [Path(path) for path in paths]
    runs = [(_label(path), _require_steps(read_metrics(path), path)) for path in files]
    figure, (loss_axes, rate_axes) = _new_figure()
    for number, (label, records) in enumerate(runs):
        colour = _COLOURS[number % len(_COLOURS)]
        name = f"{label}: " if len(runs) > 1 else ""
        _draw_losses(loss_axes, records, x, colour, name)
        steps = _of_kind(records, "step")
        rate_axes.plot(_along(steps, x), [step["learning_rate"] for step in steps], color=colour, linewidth=1.4)
        _mark_layouts(loss_axes, rate_axes, steps, x)
    _finish(loss_axes, rate_axes, x, title)
    save_picture(figure, png_path, dpi=150)


def _new_figure() -> tuple[Any, tuple[Axes, Axes]]:
    """Create a figure with two panels over one x axis, without matplotlib's global state."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.5, 5.6), layout="constrained", facecolor="white")
    axes = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
    return figure, tuple(axes)


def _label(path: Path) -> str:
    """Name of a run: of its folder for the default file name, otherwise of the file."""
    return Path(os.path.realpath(path)).parent.name if path.stem == "metrics" else path.stem


def _require_steps(records: list[Record], path: Path) -> list[Record]:
    """Return ``records``; ``DataError`` if they have no step."""
    if not _of_kind(records, "step"):
        raise DataError(f"metrics file {path} has no steps; give the metrics.jsonl of a run with steps")
    return records


def _of_kind(records: list[Record], kind_of_record: str) -> list[Record]:
    return [record for record in records if record["kind"] == kind_of_record]


def validations(records: Iterable[Record]) -> dict[str, list[Record]]:
    """The evaluations of each set of validation data; questions and test data are not among them."""
    by_split: dict[str, list[Record]] = {}
    for record in records:
        if record["kind"] == "validation" and record["split"].split(" ")[0] == "validation":
            by_split.setdefault(record["split"], []).append(record)
    return by_split


def _along(records: list[Record], x: XAxis) -> list[int]:
    """Positions of records on the x axis."""
    return [record["iteration" if x == "iteration" else "consumed_tokens"] for record in records]


def _draw_losses(axes: Axes, records: list[Record], x: XAxis, colour: str, name: str) -> None:
    """Draw the training line and validation points of one run."""
    steps = _of_kind(records, "step")
    positions = _along(_of_kind(records, "step"), x)
    losses = [step["loss"] if math.isfinite(step["loss"]) else math.nan for step in steps]
    if len(losses) >= _SMOOTH_FROM:
        axes.plot(positions, losses, color=colour, alpha=0.28, linewidth=0.8)
        losses = _smooth(losses, len(losses) // 50)
    axes.plot(positions, losses, color=colour, linewidth=1.8, label=f"{name}training")
    gaps = [position for position, step in zip(positions, steps, strict=True) if not math.isfinite(step["loss"])]
    if gaps:
        top = axes.get_xaxis_transform()
        axes.plot(gaps, [0.98] * len(gaps), "x", color=colour, transform=top, label=f"{name}not finite")
    for number, (split, checks) in enumerate(validations(records).items()):
        axes.plot(
            _along(checks, x),
            [check["loss"] for check in checks],
            color=_INK if not name else colour,
            linewidth=1.0,
            linestyle=(0, (4, 2)),
            marker=_MARKERS[number % len(_MARKERS)],
            markersize=4.5,
            markerfacecolor="white",
            label=f"{name}{split}",
        )


def _smooth(values: list[float], width: int) -> list[float]:
    """Centred moving mean over ``width`` values, ignoring NaN.

    The window is symmetric and therefore narrow at the ends: a one-sided window would shift the steep start.
    """
    half = max(width // 2, 1)
    smooth = []
    for position in range(len(values)):
        reach = min(half, position)
        near = [value for value in values[position - reach : position + reach + 1] if not math.isnan(value)]
        smooth.append(sum(near) / len(near) if near else math.nan)
    return smooth


def _mark_layouts(loss_axes: Axes, rate_axes: Axes, steps: list[Record], x: XAxis) -> None:
    """Draw a dotted line and the name of the new layout at each change of layout."""
    positions = _along(steps, x)
    before = steps[0].get("layout")
    for step, position in zip(steps, positions, strict=True):
        if step.get("layout") == before:
            continue
        before = step.get("layout")
        for axes in (loss_axes, rate_axes):
            axes.axvline(position, color=_GREY, linewidth=0.9, linestyle=":")
        loss_axes.annotate(
            f" {before}", (position, 0.94), xycoords=("data", "axes fraction"), color=_GREY, fontsize=8.5, va="top"
        )


def _finish(loss_axes: Axes, rate_axes: Axes, x: XAxis, title: str) -> None:
    """Add titles, labels, grids and frames."""
    from matplotlib.ticker import EngFormatter

    loss_axes.set_title(title, loc="left", fontsize=12, color=_INK)
    loss_axes.set_ylabel("loss per token")
    rate_axes.set_ylabel("learning rate")
    rate_axes.set_xlabel("tokens" if x == "tokens" else "iteration")
    if x == "tokens":
        rate_axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    rate_axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 2))
    rate_axes.set_ylim(bottom=0)
    loss_axes.legend(frameon=False, loc="best", fontsize=9)
    for axes in (loss_axes, rate_axes):
        axes.grid(True, color="#e5e7eb", linewidth=0.7)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color("#9ca3af")
        axes.tick_params(colors=_GREY, labelsize=9)
        axes.yaxis.label.set_color(_INK)
        axes.xaxis.label.set_color(_INK)
        axes.margins(x=0.01)
