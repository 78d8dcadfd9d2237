"""The lengths of a token file's documents as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from megatron_core.datasets.lengths import Lengths

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INK, _GREY = "#1f2937", "#6b7280"
_DOCUMENTS, _TOKENS = "#2563eb", "#12876f"
_NOTHING = 0.5


def plot_lengths(lengths: Lengths, png_path: str | Path, title: str) -> None:
    """Draw how many documents have which length, and below it how many of the tokens they hold, into `png_path`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.5, 5.2), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True)
    bars = lengths.bars(parts=2)
    # Empty documents have no place on a scale of factors; they stand left of those of one token.
    left = [max(bar.low, _NOTHING) for bar in bars]
    width = [bar.high - low for bar, low in zip(bars, left, strict=True)]
    counts = [bar.documents for bar in bars]
    shares = [100 * bar.tokens / max(int(lengths.tokens.sum()), 1) for bar in bars]
    for axes, heights, colour in ((upper, counts, _DOCUMENTS), (lower, shares, _TOKENS)):
        axes.bar(left, heights, width, align="edge", color=colour, alpha=0.85, edgecolor="white", linewidth=0.6)
    upper.set_title(title, loc="left", fontsize=12, color=_INK)
    upper.set_ylabel(lengths.unit)
    lower.set_ylabel("% of all tokens")
    lower.set_xlabel(f"tokens in {_one(lengths.unit)}")
    _mark(upper, lengths)
    for axes in (upper, lower):
        _finish(axes)
    if lengths.documents[0]:
        _name_nothing(lower)
    Path(png_path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(png_path, dpi=150)


def _one(unit: str) -> str:
    return f"a {unit.removesuffix('s')}"


def _mark(axes: Axes, lengths: Lengths) -> None:
    """Lines at the median and at the mean."""
    for place, name, line in ((lengths.quantile(0.5), "median", (0, (4, 2))), (lengths.mean, "mean", ":")):
        axes.axvline(max(place, _NOTHING), color=_INK, linewidth=1.2, linestyle=line, label=f"{name} {place:,.0f}")
    axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1.0, 0.99), ncols=2, fontsize=9)


def _name_nothing(axes: Axes) -> None:
    """A 0 below the bar of the empty documents, where the scale has no tick."""
    middle = _NOTHING**0.5
    below = {"xytext": (0, -7), "textcoords": "offset points", "ha": "center", "va": "top"}
    axes.annotate("0", (middle, 0.0), xycoords=("data", "axes fraction"), color=_GREY, fontsize=9, **below)


def _finish(axes: Axes) -> None:
    from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator

    axes.set_xscale("log", base=10)
    left, right = axes.get_xlim()
    # A scale of less than three factors of 10 would have few numbers on it.
    axes.xaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5) if right < 1000 * left else (1,)))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(True, axis="y", color="#e5e7eb", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#9ca3af")
    axes.tick_params(colors=_GREY, labelsize=9)
    axes.tick_params(which="minor", color="#9ca3af", labelbottom=False)
    axes.xaxis.label.set_color(_INK)
    axes.yaxis.label.set_color(_INK)
