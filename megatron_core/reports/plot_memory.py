"""Plot memory by kind over a step."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_core.output_file import save_picture

_INK = "#1f2937"
_GREY = "#6b7280"
# Okabe and Ito's colours for colour-blind readers, and greys for small kinds.
_COLOURS = ("#0072b2", "#56b4e9", "#009e73", "#e69f00", "#d55e00", "#cc79a7", "#9ca3af", "#d1d5db")


def plot_memory(
    times: Sequence[float],
    kinds: Mapping[str, Sequence[float]],
    limit: float,
    png_path: str | Path,
    *,
    title: str = "Memory over a step",
) -> None:
    """Draw bytes by kind, stacked, over seconds into ``png_path``, with a line at the memory of the device."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 4.6), layout="constrained", facecolor="white")
    axes = figure.subplots()
    gib = [[size / 2**30 for size in sizes] for sizes in kinds.values()]
    axes.stackplot(times, gib, labels=list(kinds), colors=_COLOURS[: len(gib)], linewidth=0)
    most = max(map(sum, zip(*gib, strict=True)))
    if most > limit / 2**30 / 3:  # otherwise the line would compress the other curves
        axes.axhline(limit / 2**30, color=_INK, linewidth=1.2, linestyle=(0, (4, 2)), label="memory of the device")
    axes.set_title(title, loc="left", fontsize=9.5, color=_INK, wrap=True)
    axes.set_xlabel("time (s)", color=_INK)
    axes.set_ylabel("memory (GiB)", color=_INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=_GREY, labelsize=9)
    axes.grid(True, axis="y", color="#e5e7eb", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.margins(x=0)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], frameon=False, fontsize=9, loc="outside right center")
    save_picture(figure, png_path, dpi=130)
