"""Pictures of a run: curves of the loss, loads of experts, memory over a step, and timelines of a pipeline."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from megatron_core.errors import DataError
from megatron_core.planner.simulate import Timeline, peak_activations
from megatron_core.prepared_output import save_picture
from megatron_core.reports.metrics import read_metrics, recorded_loads
from megatron_core.reports.timelines import COLOURS, NAMES, four_digits, kinds, shade

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
    figure = _new_figure(8.5, 5.6)
    loss_axes, rate_axes = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
    for number, (label, records) in enumerate(runs):
        colour = _COLOURS[number % len(_COLOURS)]
        name = f"{label}: " if len(runs) > 1 else ""
        _draw_losses(loss_axes, records, x, colour, name)
        steps = _of_kind(records, "step")
        rate_axes.plot(_along(steps, x), [step["learning_rate"] for step in steps], color=colour, linewidth=1.4)
        _mark_layouts(loss_axes, rate_axes, steps, x)
    _finish(loss_axes, rate_axes, x, title)
    save_picture(figure, png_path, dpi=150)


def _new_figure(width: float, height: float) -> Any:
    """Create a figure without matplotlib's global state."""
    from matplotlib.figure import Figure  # it takes a while to load

    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


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
        _frame(axes, margin=0.01)


def _frame(axes: Axes, *, margin: float) -> None:
    """Draw grid, frame and labels of an axis; ``margin``: share of the width left free at both ends."""
    axes.grid(True, color="#e5e7eb", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#9ca3af")
    axes.tick_params(colors=_GREY, labelsize=9)
    axes.yaxis.label.set_color(_INK)
    axes.xaxis.label.set_color(_INK)
    axes.margins(x=margin)


MOST_COLUMNS = 800
"""Maximum number of columns; more steps are averaged with their neighbours."""


def expert_loads(path: str | Path) -> tuple[list[int], np.ndarray]:
    """Return the layers with experts, and (load / mean load) of each expert, ``[layers, experts, steps]``.

    Errors: ``DataError`` for a metrics file without experts.
    """
    steps = recorded_loads(read_metrics(path))
    if not steps:
        raise DataError(f"metrics file {path} has no load of experts; give the file of a run with --num-experts")
    layers = sorted(map(int, steps[0]))
    tokens = np.array([[step[str(layer)]["tokens"] for layer in layers] for step in steps], dtype=np.float64)
    mean = tokens.mean(axis=2, keepdims=True)
    return layers, np.divide(tokens, mean, out=np.ones_like(tokens), where=mean > 0).transpose(1, 2, 0)


def plot_expert_load(path: str | Path, png_path: str | Path, *, title: str = "Load of the experts") -> None:
    """Draw the loads of ``path``: white is the mean load, blue is less, red is more, up to twice the mean."""
    layers, loads = expert_loads(path)
    figure = _new_figure(8.5, min(2.5 + 0.5 * len(layers), 14))
    axes: Any = figure.subplots()
    experts, steps = loads.shape[1:]
    all_rows = loads.reshape(-1, steps)
    neighbours = np.array_split(np.arange(steps), min(steps, MOST_COLUMNS))
    rows = np.stack([all_rows[:, group].mean(axis=1) for group in neighbours], axis=1)
    image = axes.imshow(
        rows, aspect="auto", cmap="RdBu_r", vmin=0.0, vmax=2.0, interpolation="nearest",
        extent=(0.5, steps + 0.5, len(rows), 0),
    )  # fmt: skip
    axes.set_yticks([(i + 0.5) * experts for i in range(len(layers))], [f"layer {layer}" for layer in layers])
    for border in range(1, len(layers)):
        axes.axhline(border * experts, color=_INK, linewidth=0.6)
    axes.set_xlabel("step")
    axes.set_title(title, loc="left", fontsize=12)
    figure.colorbar(image, ax=axes, label="load / mean load", extend="max")
    save_picture(figure, png_path, dpi=150)


# Okabe and Ito's colours for colour-blind readers, and greys for small kinds.
_MEMORY_COLOURS = ("#0072b2", "#56b4e9", "#009e73", "#e69f00", "#d55e00", "#cc79a7", "#9ca3af", "#d1d5db")


def plot_memory(
    times: Sequence[float],
    kinds: Mapping[str, Sequence[float]],
    limit: float,
    png_path: str | Path,
    *,
    title: str = "Memory over a step",
) -> None:
    """Draw bytes by kind, stacked, over seconds into ``png_path``, with a line at the memory of the device."""
    figure = _new_figure(9.0, 4.6)
    axes = figure.subplots()
    gib = [[size / 2**30 for size in sizes] for sizes in kinds.values()]
    axes.stackplot(times, gib, labels=list(kinds), colors=_MEMORY_COLOURS[: len(gib)], linewidth=0)
    most = max(map(sum, zip(*gib, strict=True)))
    if most > limit / 2**30 / 3:  # otherwise the line would compress the other curves
        axes.axhline(limit / 2**30, color=_INK, linewidth=1.2, linestyle=(0, (4, 2)), label="memory of the device")
    axes.set_title(title, loc="left", fontsize=9.5, color=_INK, wrap=True)
    axes.set_xlabel("time (s)")
    axes.set_ylabel("memory (GiB)")
    _frame(axes, margin=0.0)
    axes.grid(visible=False, axis="x")
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], frameon=False, fontsize=9, loc="outside right center")
    save_picture(figure, png_path, dpi=130)


_IDLE = "#e8eaed"
_TRANSFER = "#4b5563"
_TRANSFER_HEIGHT = 0.1
_HEIGHT = 0.86  # of a box; the height of a rank's row is 1
_ROW_INCHES, _HEAD_INCHES, _FOOT_INCHES = 0.27, 0.42, 0.62
_WIDTH_INCHES = 11.0
_DPI = 125  # sharp on a page; three panels of small boxes need less than 150 kB
_DIGIT = 0.64  # width of a digit / font size
_SMALLEST, _LARGEST = 5.0, 8.5  # size of numbers, in points


def plot_timelines(timelines: Sequence[tuple[str, Timeline]], png_path: str | Path, *, unit: str = "") -> None:
    """Draw titled timelines below one another into ``png_path``.

    Boxes are coloured by kind, paler for later chunks, and have the number of the micro-batch if it fits; a dark line
    below a measured rank's boxes marks its transfers in flight. The peak of
    activations, in micro-batches, is right of each rank; bubble and makespan are above each panel.
    """
    longest = max(timeline.makespan for _, timeline in timelines)
    rows = [len(timeline.plan.ranks) for _, timeline in timelines]
    figure = _new_figure(_WIDTH_INCHES, sum(rows) * _ROW_INCHES + len(rows) * _HEAD_INCHES + _FOOT_INCHES)
    panels = figure.subplots(len(rows), 1, sharex=True, height_ratios=rows, squeeze=False)[:, 0]
    for axes, (title, timeline) in zip(panels, timelines, strict=True):
        _draw_boxes(axes, timeline, longest)
        _label_timeline(axes, title, timeline, longest)
    panels[-1].set_xlabel(f"time ({unit})" if unit else "time", color=_INK, fontsize=9)
    _draw_legend(figure, [timeline for _, timeline in timelines])
    save_picture(figure, png_path, dpi=_DPI)


def _draw_boxes(axes: Axes, timeline: Timeline, longest: float) -> None:
    """Draw all actions on a pale background, which shows idle time."""
    plan = timeline.plan
    first = min(timeline.start.values(), default=0.0)
    points = 72 * _WIDTH_INCHES * 0.86 / longest if longest else 0.0  # per unit of time; labels need the rest
    size = _number_size(timeline, points)
    for rank, actions in enumerate(plan.ranks):
        axes.broken_barh([(0, timeline.makespan)], (rank - _HEIGHT / 2, _HEIGHT), facecolors=_IDLE)
        boxes = [(start - first, end - start) for start, end in (timeline.boxes[action] for action in actions)]
        colours = [shade(COLOURS[action.kind], plan.chunks[action.stage], plan.num_chunks) for action in actions]
        axes.broken_barh(boxes, (rank - _HEIGHT / 2, _HEIGHT), facecolors=colours, edgecolors="white", linewidths=0.5)
        transfers = timeline.transfers[rank] if timeline.transfers else ()
        lines = [
            (transfer.start - first, transfer.end - transfer.start)
            for transfer in transfers
            if transfer.start - first < longest
        ]
        below = (rank + _HEIGHT / 2 - _TRANSFER_HEIGHT, _TRANSFER_HEIGHT)
        axes.broken_barh(lines, below, facecolors=_TRANSFER)
        for action, (start, time) in zip(actions, boxes, strict=True):
            if len(str(action.micro)) * _DIGIT * size <= time * points:
                axes.text(start + time / 2, rank, str(action.micro), ha="center", va="center_baseline", fontsize=size)


def _number_size(timeline: Timeline, points: float) -> float:
    """Font size of all numbers in a panel: the largest number fits the shortest box in which it is legible."""
    digits = len(str(max(timeline.plan.num_microbatches - 1, 0)))
    times = sorted(end - start for start, end in timeline.boxes.values())
    fitting = (0.85 * time * points / digits / _DIGIT for time in times)  # the rest is a margin
    return min(next((size for size in fitting if size >= _SMALLEST), _SMALLEST), _LARGEST)


def _label_timeline(axes: Axes, title: str, timeline: Timeline, longest: float) -> None:
    """Add titles, ranks and peaks; remove the frame."""
    peaks = peak_activations(timeline.plan)
    rates = f"bubble {timeline.bubble:.1%}    idle {timeline.idle:.1%}    makespan {four_digits(timeline.makespan)}"
    axes.set_title(title, loc="left", fontsize=10.5, color=_INK, fontweight="bold")
    axes.set_title(rates, loc="right", fontsize=9.5, color=_INK)
    axes.set_xlim(0, longest)
    axes.set_ylim(len(peaks) - 0.5, -0.5)
    axes.set_yticks(range(len(peaks)), [f"rank {rank}" for rank in range(len(peaks))])
    for row, text, colour in [
        (-0.85, "peak", _GREY),
        *((rank, f"{peak:g}", _INK) for rank, peak in enumerate(peaks)),
    ]:
        options: dict[str, Any] = {
            "xycoords": ("axes fraction", "data"),
            "xytext": (6, 0),
            "textcoords": "offset points",
        }
        axes.annotate(text, (1, row), **options, va="center", fontsize=8.5, color=colour, annotation_clip=False)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, colors=_GREY, labelsize=8.5)


def _draw_legend(figure: Any, timelines: list[Timeline]) -> None:
    """Add an entry for each kind of action, and explain shades and peaks."""
    from matplotlib.patches import Patch

    present = {action_kind for timeline in timelines for action_kind in kinds(timeline.plan)}
    handles = [
        Patch(color=colour, label=NAMES[action_kind])
        for action_kind, colour in COLOURS.items()
        if action_kind in present
    ]
    handles.append(Patch(color=_IDLE, label="idle"))
    if any(any(timeline.transfers) for timeline in timelines):
        handles.append(Patch(color=_TRANSFER, label="transfer in flight"))
    notes = ["paler: later chunk"] if any(timeline.plan.num_chunks > 1 for timeline in timelines) else []
    handles += [Patch(alpha=0, label=note) for note in [*notes, "peak: activations held, in micro-batches"]]
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=len(handles),
        frameon=False,
        fontsize=8.5,
        labelcolor=_INK,
        handlelength=1.2,
        handletextpad=0.5,
        columnspacing=1.4,
    )
