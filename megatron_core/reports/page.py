"""Parts of a self-contained HTML page, in light and dark, for screen and print; the markup is in ``templates/``.

The templates escape all text, and the page is well-formed XML, too. Charts are inline SVG.
"""

import base64
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

COLOURS = ("#2f6fde", "#d9742b", "#1f9273", "#a8429a", "#7a7f87", "#c4453a", "#8a6d1d", "#4aa3c7", "#5b4fc9", "#9bbf3b")
GENERATOR = "megatron_core.monitor.page"
"""Written into each page. Pages of earlier versions have the same text, so that a report may replace them."""
Point = tuple[float, float]


def three_digits(value: object) -> str:
    """Floats with three digits; other values unchanged."""
    if not isinstance(value, float):
        return str(value)
    if not math.isfinite(value):
        return str(value)
    if value and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.2e}"
    return f"{value:,.{max(0, 2 - math.floor(math.log10(abs(value))))}f}" if value else "0"


_TEMPLATES = Environment(
    loader=PackageLoader(__package__), autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True
)
_TEMPLATES.filters["digits"] = three_digits
BLOCKS: Any = _TEMPLATES.get_template("blocks.html").module
"""The macros of ``blocks.html``; those with geometry have a function here."""


def page(title: str, sections: Sequence[tuple[str, str, Markup]]) -> str:
    """Render a page of sections: identifier, heading, and content."""
    return _TEMPLATES.get_template("page.html").render(title=title, generator=GENERATOR, sections=sections)


def html_table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> Markup:
    """A table that scrolls sideways on a narrow screen; columns of numbers are right-aligned, with three digits."""
    columns = range(len(head))
    numeric = [bool(rows) and all(isinstance(row[column], int | float) for row in rows) for column in columns]
    return BLOCKS.table(head, rows, numeric)


def bars(rows: Mapping[str, Mapping[str, float]], unit: str) -> Markup:
    """A bar for each row, stacked from its parts, all to one scale, and a key with the mean of each part."""
    totals = {name: sum(row.get(name, 0.0) for row in rows.values()) for row in rows.values() for name in row}
    names = sorted(totals, key=lambda name: -totals[name])
    longest = max((sum(row.values()) for row in rows.values()), default=0.0) or 1.0
    stacks = {
        label: [(name, row[name], 100 * row[name] / longest) for name in names if row.get(name)]
        for label, row in rows.items()
    }
    means = {name: totals[name] / max(len(rows), 1) for name in names}
    return BLOCKS.bars(stacks, means, _coloured(names), unit)


def chart(curves: Mapping[str, Sequence[Point]], x: str, y: str, marks: Sequence[tuple[float, str]] = ()) -> Markup:
    """Lines over a common x axis of integers; values that are not finite leave gaps.

    ``marks``: positions on the x axis and texts of vertical lines.
    """
    points = [point for curve in curves.values() for point in curve if math.isfinite(point[1])]
    if not points:
        return BLOCKS.paragraph("nothing was recorded", "soft")
    (begin, end), (low, high) = (_span([point[axis] for point in points]) for axis in (0, 1))
    width, height, left, right = 720, 260, 78, 710

    def across(share: float) -> float:
        return left + share * (right - left)

    def down(value: float) -> float:
        return 10 + (high - value) / (high - low) * (height - 46)

    integers = [value for value in _ticks(begin, end) if value == round(value)]
    labels = [(f"{value:,.0f}", across((value - begin) / (end - begin))) for value in integers]
    lines_at = [
        (across((position - begin) / (end - begin)), text) for position, text in marks if begin <= position <= end
    ]
    lines = [
        (name, [f"{across((position - begin) / (end - begin)):.1f},{down(value):.1f}" for position, value in stretch])
        for name, curve in curves.items()
        for stretch in _finite_stretches(curve)
    ]
    ticks = [(value, down(value)) for value in _ticks(low, high)]
    return BLOCKS.chart(x, y, width, height, left, right, ticks, labels, lines, _coloured(curves), lines_at)


def embedded_picture(path: Path, label: str) -> Markup:
    """A PNG file as a part of the page."""
    return BLOCKS.picture(base64.b64encode(path.read_bytes()).decode(), label)


def _coloured(names: Iterable[str]) -> dict[str, str]:
    return {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(names)}


def _span(values: Sequence[float]) -> Point:
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 0.5 * (abs(low) or 1), high + 0.5 * (abs(high) or 1))


def _ticks(low: float, high: float) -> list[float]:
    """Two to five round numbers."""
    size = 10.0 ** math.floor(math.log10((high - low) / 4))
    step = next(factor * size for factor in (1, 2, 5, 10) if 4 * factor * size >= high - low)
    return [step * number for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _finite_stretches(curve: Sequence[Point]) -> list[list[Point]]:
    stretches: list[list[Point]] = [[]]
    for point in curve:
        if math.isfinite(point[1]):
            stretches[-1].append(point)
        elif stretches[-1]:
            stretches.append([])
    return [stretch for stretch in stretches if stretch]
