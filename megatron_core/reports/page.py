"""Parts of a self-contained HTML page, in light and dark, for screen and print; the markup is in ``templates/``.

The templates escape all text, and the page is well-formed XML, too. uPlot (https://github.com/leeoniya/uPlot, MIT
license), which is part of the page, draws the charts: the pointer shows values, dragging zooms, a double click returns.
"""

import base64
import json
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
    has_charts = any('class="chart"' in content for _, _, content in sections)
    template = _TEMPLATES.get_template("page.html")
    return template.render(title=title, generator=GENERATOR, sections=sections, has_charts=has_charts)


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
    """Lines over a common x axis; values that are not finite leave gaps.

    ``marks``: positions on the x axis and texts of vertical lines.
    """
    if not any(math.isfinite(value) for curve in curves.values() for _, value in curve):
        return BLOCKS.paragraph(f"{y}: nothing was recorded", "soft")
    colours = _coloured(curves)
    drawn = [
        {
            "name": name,
            "colour": colours[name],
            "points": [
                [position for position, _ in curve],
                [value if math.isfinite(value) else None for _, value in curve],
            ],
        }
        for name, curve in curves.items()
    ]
    return BLOCKS.chart(json.dumps({"x": x, "y": y, "curves": drawn, "marks": list(marks)}))


def embedded_picture(path: Path, label: str) -> Markup:
    """A PNG file as a part of the page."""
    return BLOCKS.picture(base64.b64encode(path.read_bytes()).decode(), label)


def _coloured(names: Iterable[str]) -> dict[str, str]:
    return {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(names)}
