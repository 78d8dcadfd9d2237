"""Plot the load of experts as a heat map: every expert of every layer over the steps of a run."""

from pathlib import Path
from typing import Any

import numpy as np

from megatron_core.errors import DataError
from megatron_core.output_file import save_picture
from megatron_core.reports.expert_load import recorded_loads
from megatron_core.reports.metrics import read_metrics

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
    from matplotlib.figure import Figure

    layers, loads = expert_loads(path)
    figure = Figure(figsize=(8.5, min(2.5 + 0.5 * len(layers), 14)), layout="constrained", facecolor="white")
    axes: Any = figure.subplots()
    experts, steps = loads.shape[1:]
    rows = _narrowed(loads.reshape(-1, steps))
    image = axes.imshow(
        rows, aspect="auto", cmap="RdBu_r", vmin=0.0, vmax=2.0, interpolation="nearest",
        extent=(0.5, steps + 0.5, len(rows), 0),
    )  # fmt: skip
    axes.set_yticks([(i + 0.5) * experts for i in range(len(layers))], [f"layer {layer}" for layer in layers])
    for border in range(1, len(layers)):
        axes.axhline(border * experts, color="#1f2937", linewidth=0.6)
    axes.set_xlabel("step")
    axes.set_title(title, loc="left", fontsize=12)
    figure.colorbar(image, ax=axes, label="load / mean load", extend="max")
    save_picture(figure, png_path, dpi=150)


def _narrowed(rows: np.ndarray) -> np.ndarray:
    """Reduce ``[n, steps]`` to at most ``MOST_COLUMNS`` columns by averaging neighbouring steps."""
    groups = np.array_split(np.arange(rows.shape[1]), min(rows.shape[1], MOST_COLUMNS))
    return np.stack([rows[:, group].mean(axis=1) for group in groups], axis=1)
