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


def write_figures(path: Path | None, figures: dict[str, Any]) -> None:
    """Print figures, and write them to ``path``. Numbers that are not finite are written as text."""
    text = json.dumps(_finite(figures), indent=2, allow_nan=False)
    print(text)
    if path is not None:
        path.write_text(text + "\n", encoding="utf-8")


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
