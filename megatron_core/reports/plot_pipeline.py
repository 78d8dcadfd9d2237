"""Plot pipeline timelines: one panel for each, with a common time axis."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_core.output_file import save_picture
from megatron_core.reports.timelines import COLOURS, NAMES, four_digits, kinds, shade
from megatron_core.schedules.simulate import Timeline, peak_activations

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INK = "#1f2937"
_GREY = "#6b7280"
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
    figure, panels = _new_figure([len(timeline.plan.ranks) for _, timeline in timelines])
    for axes, (title, timeline) in zip(panels, timelines, strict=True):
        _draw_boxes(axes, timeline, longest)
        _label(axes, title, timeline, longest)
    panels[-1].set_xlabel(f"time ({unit})" if unit else "time", color=_INK, fontsize=9)
    _draw_legend(figure, [timeline for _, timeline in timelines])
    save_picture(figure, png_path, dpi=_DPI)


def _new_figure(rows: list[int]) -> tuple[Any, list[Axes]]:
    """Create a figure with one panel for each number of rows, without matplotlib's global state."""
    from matplotlib.figure import Figure

    height = sum(rows) * _ROW_INCHES + len(rows) * _HEAD_INCHES + _FOOT_INCHES
    figure = Figure(figsize=(_WIDTH_INCHES, height), layout="constrained", facecolor="white")
    axes = figure.subplots(len(rows), 1, sharex=True, height_ratios=rows, squeeze=False)
    return figure, list(axes[:, 0])


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


def _label(axes: Axes, title: str, timeline: Timeline, longest: float) -> None:
    """Add titles, ranks and peaks; remove the frame."""
    peaks = peak_activations(timeline.plan)
    rates = f"bubble {timeline.bubble:.1%}    idle {timeline.idle:.1%}    makespan {four_digits(timeline.makespan)}"
    axes.set_title(title, loc="left", fontsize=10.5, color=_INK, fontweight="bold")
    axes.set_title(rates, loc="right", fontsize=9.5, color=_INK)
    axes.set_xlim(0, longest)
    axes.set_ylim(len(peaks) - 0.5, -0.5)
    axes.set_yticks(range(len(peaks)), [f"rank {rank}" for rank in range(len(peaks))])
    for row, text, colour in [(-0.85, "peak", _GREY), *((rank, f"{peak:g}", _INK) for rank, peak in enumerate(peaks))]:
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
