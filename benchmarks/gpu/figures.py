"""How a stage hands its figures to the program that started it. Needs no torch."""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any


def arguments(*names: str) -> argparse.Namespace:
    """The positional arguments ``names``, ``--device`` and ``--out``."""
    parser = argparse.ArgumentParser()
    for name in names:
        parser.add_argument(name)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def out_file() -> Path | None:
    """The file of ``--out``; None prints only."""
    found: Path | None = arguments().out
    return found


def write_figures(path: Path | None, figures: dict[str, Any], *, shows: bool = True) -> None:
    """Print figures, and write them to ``path``. Numbers that are not finite are written as text."""
    text = json.dumps(_finite(figures), indent=2, allow_nan=False)
    if shows:
        print(text)
    if path is not None:
        # A stage that is killed leaves the figures before or these, and no half of a file.
        replacement = path.with_suffix(".new")
        replacement.write_text(text + "\n", encoding="utf-8")
        replacement.replace(path)


def headline(figures: dict[str, Any]) -> str:
    """The numbers of a stage that are worth a line of the terminal."""
    words = []
    if (rate := figures.get("tokens_per_second")) is not None:
        words.append(f"{rate:,.0f} tokens/s")
    for name, label in (("mfu", "MFU"), ("of_products", "of products"), ("hidden", "hidden")):
        if figures.get(name) is not None:
            words.append(f"{figures[name]:.1%} {label}")
    if figures.get("launches_per_layer") is not None:
        words.append(f"{figures['launches_per_layer']:.0f} {figures['counted']} for each layer")
        words.append(f"{figures['host_waits_per_step']:.0f} host waits for each step")
    if isinstance(difference := figures.get("largest_difference"), float):
        words.append(f"differs by {difference:.1e}")
    return ", ".join(words)


def skip(path: Path | None, reason: str) -> None:
    """End the stage as skipped."""
    write_figures(path, {"skipped": reason})
    sys.exit(0)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
