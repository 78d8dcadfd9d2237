"""Lengths of the documents of a token file: a histogram of constant memory, and its plot."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_core.datasets.indexed import IndexedDataset, get_idx_path
from megatron_core.datasets.validate import blocks
from megatron_core.errors import DataError

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# Lengths fall into 16 parts of each factor of 2, so a quantile is known to within 2**(1/16), 4.4 percent.
PARTS = 16
EDGES = np.unique(np.ceil(2.0 ** (np.arange(48 * PARTS + 1) / PARTS)).astype(np.int64))


@dataclass(frozen=True)
class Bar:
    """Documents of [low, high) tokens: how many, and the tokens in them."""

    low: int
    high: int
    documents: int
    tokens: int


@dataclass(frozen=True)
class Lengths:
    """Counts of documents and of their tokens by length.

    documents, tokens: int64 [len(EDGES) + 1]; entry 0 is for empty documents, entry i for lengths in
    [EDGES[i - 1], EDGES[i]). unit: what was counted, "documents", or "sequences" in a file that closes no document.
    """

    documents: np.ndarray
    tokens: np.ndarray
    shortest: int
    longest: int
    unit: str

    @property
    def count(self) -> int:
        """Documents in all."""
        return int(self.documents.sum())

    @property
    def mean(self) -> float:
        """Tokens in a document, on average."""
        return float(self.tokens.sum()) / max(self.count, 1)

    def quantile(self, share: float) -> int:
        """The length that this share of the documents does not exceed, to within 4.4 percent."""
        entry = int(np.searchsorted(np.cumsum(self.documents), share * self.count))
        upper = 0 if entry == 0 else int(EDGES[min(entry, len(EDGES) - 1)]) - 1
        return min(max(upper, self.shortest), self.longest)

    def bars(self, parts: int) -> list[Bar]:
        """The histogram with `parts` bars for each factor of 2, from the shortest to the longest document."""
        steps = int(np.ceil(np.log2(self.longest + 1) * parts)) if self.longest else 0
        edges = np.unique(np.ceil(2.0 ** (np.arange(steps + 1) / parts)).astype(np.int64))
        bars = [Bar(0, 1, int(self.documents[0]), 0)]
        for low, high in pairwise(edges.tolist()):
            first, last = np.searchsorted(EDGES, [low, high]) + 1
            bars.append(Bar(low, high, int(self.documents[first:last].sum()), int(self.tokens[first:last].sum())))
        filled = [number for number, bar in enumerate(bars) if bar.documents]
        return bars[filled[0] : filled[-1] + 1] if filled else []


def document_lengths(dataset: IndexedDataset) -> Lengths:
    """The lengths of all documents; of all sequences where no document is closed.

    DataError: the index is damaged, so that a document would have less than no tokens.
    """
    index = dataset.document_indices
    count, unit = (len(index) - 1, "documents") if len(index) > 1 else (len(dataset), "sequences")
    documents, tokens = np.zeros(len(EDGES) + 1, np.int64), np.zeros(len(EDGES) + 1, np.int64)
    shortest, longest = None, 0
    for start, stop in blocks(count):
        lengths = _lengths(dataset, start, stop) if unit == "documents" else dataset.sequence_lengths[start:stop]
        low, high = int(lengths.min()), int(lengths.max())
        if low < 0:
            raise _damaged(dataset)
        shortest, longest = low if shortest is None else min(shortest, low), max(longest, high)
        entries = np.searchsorted(EDGES, lengths, side="right")
        documents += np.bincount(entries, minlength=len(documents))
        # The weights are summed as float64, which counts a block's tokens exactly up to 2**53.
        tokens += np.bincount(entries, weights=lengths, minlength=len(documents)).astype(np.int64)
    return Lengths(documents, tokens, shortest or 0, longest, unit)


def _lengths(dataset: IndexedDataset, start: int, stop: int) -> np.ndarray:
    """Tokens in each of the documents [start, stop): where the next one begins, less where it begins itself."""
    sequences = np.asarray(dataset.document_indices[start : stop + 1])
    if sequences.min() < 0 or sequences.max() > len(dataset):
        raise _damaged(dataset)
    if not len(dataset):
        return np.zeros(stop - start, np.int64)
    itemsize = np.dtype(dataset.dtype).itemsize
    end = int(dataset.sequence_pointers[-1]) + int(dataset.sequence_lengths[-1]) * itemsize
    inside = np.minimum(sequences, len(dataset) - 1)
    return np.diff(np.where(sequences < len(dataset), dataset.sequence_pointers[inside], end)) // itemsize


def _damaged(dataset: IndexedDataset) -> DataError:
    return DataError(
        f"{get_idx_path(dataset.path_prefix)} is damaged: a document ends before it begins, or after the last "
        "sequence; see where with tools/inspect_dataset.py --validate"
    )


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
    for position, name, line in ((lengths.quantile(0.5), "median", (0, (4, 2))), (lengths.mean, "mean", ":")):
        axes.axvline(
            max(position, _NOTHING), color=_INK, linewidth=1.2, linestyle=line, label=f"{name} {position:,.0f}"
        )
    axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1.0, 0.99), ncols=2, fontsize=9)


def _name_nothing(axes: Axes) -> None:
    """A 0 below the bar of the empty documents, where the scale has no tick."""
    middle = _NOTHING**0.5
    below: dict[str, Any] = {"xytext": (0, -7), "textcoords": "offset points", "ha": "center", "va": "top"}
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
