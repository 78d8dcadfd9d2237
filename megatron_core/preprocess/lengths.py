"""Document lengths of a token file: a histogram in constant memory, and its plot."""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_core.datasets.indexed import IndexedDataset, blocks
from megatron_core.prepared_output import save_picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# 16 bins per factor of 2, so a quantile is accurate to 2**(1/16), 4.4 percent.
PARTS = 16
EDGES = np.unique(np.ceil(2.0 ** (np.arange(48 * PARTS + 1) / PARTS)).astype(np.int64))


@dataclass(frozen=True)
class Bar:
    """Documents of [low, high) tokens: their number and their tokens."""

    low: int
    high: int
    documents: int
    tokens: int


@dataclass(frozen=True)
class Lengths:
    """Counts of documents and of their tokens by length.

    documents, tokens: int64 [len(EDGES) + 1]; entry 0 is for empty documents, entry i for lengths in [EDGES[i - 1],
    EDGES[i]). unit: "documents", or "sequences" for a file without closed documents.
    """

    documents: np.ndarray
    tokens: np.ndarray
    shortest: int
    longest: int
    unit: str

    @property
    def count(self) -> int:
        """Number of documents."""
        return int(self.documents.sum())

    @property
    def mean(self) -> float:
        """Mean number of tokens per document."""
        return float(self.tokens.sum()) / max(self.count, 1)

    def quantile(self, share: float) -> int:
        """The quantile of the document lengths at `share`, accurate to 4.4 percent."""
        entry = int(np.searchsorted(np.cumsum(self.documents), share * self.count))
        upper = 0 if entry == 0 else int(EDGES[min(entry, len(EDGES) - 1)]) - 1
        return min(max(upper, self.shortest), self.longest)

    def bars(self, bars_per_octave: int) -> list[Bar]:
        """The histogram with `parts` bars per factor of 2, from the shortest to the longest document."""
        steps = int(np.ceil(np.log2(self.longest + 1) * bars_per_octave)) if self.longest else 0
        edges = np.unique(np.ceil(2.0 ** (np.arange(steps + 1) / bars_per_octave)).astype(np.int64))
        bars = [Bar(0, 1, int(self.documents[0]), 0)]
        for low, high in pairwise(edges.tolist()):
            first, end = np.searchsorted(EDGES, [low, high]) + 1
            bars.append(Bar(low, high, int(self.documents[first:end].sum()), int(self.tokens[first:end].sum())))
        filled = [number for number, bar in enumerate(bars) if bar.documents]
        return bars[filled[0] : filled[-1] + 1] if filled else []


def closed_document_lengths(dataset: IndexedDataset) -> Lengths:
    """The lengths of all documents; of all sequences if no document is closed."""
    ranges = DocumentRanges(dataset)
    documents = np.zeros(len(EDGES) + 1, np.int64)
    tokens = np.zeros(len(EDGES) + 1, np.int64)
    shortest = None
    longest = 0
    for start, stop in blocks(ranges.count):
        lengths = ranges.lengths(start, stop)
        low, high = int(lengths.min()), int(lengths.max())
        shortest = low if shortest is None else min(shortest, low)
        longest = max(longest, high)
        of_block = binned(lengths)
        documents += of_block[0]
        tokens += of_block[1]
    return Lengths(documents, tokens, shortest or 0, longest, ranges.unit)


def binned(lengths: np.ndarray) -> np.ndarray:
    """Documents and their tokens by length, as in `Lengths`: int64 [2, len(EDGES) + 1]."""
    entries = np.searchsorted(EDGES, lengths, side="right")
    size = len(EDGES) + 1
    # The weights are summed in float64, which is exact up to 2**53.
    tokens = np.bincount(entries, weights=lengths, minlength=size)
    return np.stack([np.bincount(entries, minlength=size), tokens.astype(np.int64)])


class DocumentRanges:
    """Places of the documents in a token file; of its sequences if no document is closed."""

    def __init__(self, dataset: IndexedDataset) -> None:
        self._dataset = dataset
        index = dataset.document_indices
        is_closed = len(index) > 1
        self.count, self.unit = (len(index) - 1, "documents") if is_closed else (len(dataset), "sequences")
        self._end = 0
        if len(dataset):
            size = int(dataset.sequence_lengths[-1]) * dataset.itemsize
            self._end = int(dataset.sequence_pointers[-1]) + size

    def starts(self, first: int, stop: int) -> np.ndarray:
        """The number of the first token of each of the documents [first, stop); `count` stands for the end."""
        dataset = self._dataset
        sequences = np.arange(first, stop)
        if self.unit == "documents":
            sequences = np.asarray(dataset.document_indices[first:stop])
        if not len(dataset):
            return np.zeros(stop - first, np.int64)
        inside = np.minimum(sequences, len(dataset) - 1)
        pointers = np.where(sequences < len(dataset), dataset.sequence_pointers[inside], self._end)
        return pointers // dataset.itemsize

    def lengths(self, first: int, stop: int) -> np.ndarray:
        """Number of tokens of each of the documents [first, stop): int64."""
        return np.diff(self.starts(first, stop + 1))

    def first_from(self, position: int) -> int:
        """The first document that starts at a byte of the `.bin` file or after it."""
        sequence = int(np.searchsorted(self._dataset.sequence_pointers, position))
        if self.unit == "sequences":
            return sequence
        return int(np.searchsorted(self._dataset.document_indices[:-1], sequence))


_NOTHING = 0.5
"""Position of empty documents, which a logarithmic scale cannot show: left of one token."""


def plot_lengths(lengths: Lengths, png_path: str | Path, title: str) -> None:
    """Plot the histogram of document lengths, and below it that of their tokens, to `png_path`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.5, 5.2), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    draw_lengths(lengths, upper, lower)
    upper.set_title(title, loc="left", fontsize=12)
    save_picture(figure, png_path, dpi=150)


def draw_lengths(lengths: Lengths, upper: "Axes", lower: "Axes") -> None:
    """Draw the histogram of document lengths, and that of their tokens."""
    bars = lengths.bars(bars_per_octave=2)
    left = [max(bar.low, _NOTHING) for bar in bars]
    width = [bar.high - low for bar, low in zip(bars, left, strict=True)]
    shares = [100 * bar.tokens / max(int(lengths.tokens.sum()), 1) for bar in bars]
    upper.bar(left, [bar.documents for bar in bars], width, align="edge", color="#2563eb", edgecolor="white")
    lower.bar(left, shares, width, align="edge", color="#12876f", edgecolor="white")
    upper.set_ylabel(lengths.unit)
    lower.set_ylabel("% of all tokens")
    lower.set_xlabel(f"tokens in a {lengths.unit.removesuffix('s')}")
    for position, name, line in ((lengths.quantile(0.5), "median", "--"), (lengths.mean, "mean", ":")):
        upper.axvline(max(position, _NOTHING), color="black", linestyle=line, label=f"{name} {position:,.0f}")
    upper.legend(frameon=False, loc="lower right", bbox_to_anchor=(1.0, 0.99), ncols=2, fontsize=9)
    for axes in (upper, lower):
        _finish(axes)
    if lengths.documents[0]:  # the scale has no tick there
        options: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
        lower.annotate("0", (_NOTHING**0.5, 0.0), xytext=(0, -7), ha="center", va="top", fontsize=9, **options)


def _finish(axes: "Axes") -> None:
    from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator

    axes.set_xscale("log", base=10)
    left, right = axes.get_xlim()
    # Without minor ticks, a scale of less than three decades would have few numbers.
    axes.xaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5) if right < 1000 * left else (1,)))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(True, axis="y", linewidth=0.5)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
