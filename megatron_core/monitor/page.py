"""Parts of a self-contained HTML page: tables, bars and line charts as inline SVG, in light and dark, for screen and
print. All text is escaped; the page is well-formed XML, too."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

COLOURS = ("#2f6fde", "#d9742b", "#1f9273", "#a8429a", "#7a7f87", "#c4453a", "#8a6d1d", "#4aa3c7", "#5b4fc9", "#9bbf3b")
GENERATOR = "megatron_core.monitor.page"
_STYLE = Path(__file__).with_suffix(".css")


def page(title: str, sections: Sequence[tuple[str, str, str]]) -> str:
    """A whole page of sections: identifier, heading, and content that is HTML already."""
    style = escape(_STYLE.read_text(encoding="utf-8"), quote=False)
    links = " ".join(f'<a href="#{name}">{escape(heading)}</a>' for name, heading, _ in sections)
    parts = "\n".join(
        f'<section id="{name}"><h2>{escape(heading)}</h2>{content}</section>' for name, heading, content in sections
    )
    return (
        '<!DOCTYPE html>\n<html lang="en" xmlns="http://www.w3.org/1999/xhtml"><head><meta charset="utf-8"/>'
        f'<meta name="generator" content="{GENERATOR}"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f"<title>{escape(title)}</title><style>\n{style}</style></head>\n"
        f"<body><h1>{escape(title)}</h1><nav>{links}</nav>\n{parts}\n</body></html>\n"
    )


def paragraph(text: str, kind: str = "") -> str:
    """A paragraph of plain text."""
    return f'<p class="{kind}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>"


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table that scrolls sideways on a narrow screen; numbers are right-aligned, with three digits."""

    def cell(tag: str, value: object, number: bool) -> str:
        kind = ' class="n"' if number else ""
        return f"<{tag}{kind}>{escape(digits(value))}</{tag}>"

    numbers = [bool(rows) and all(isinstance(row[at], int | float) for row in rows) for at in range(len(head))]
    top = "".join(cell("th", name, number) for name, number in zip(head, numbers, strict=True))
    body = "".join(
        f"<tr>{''.join(cell('td', value, number) for value, number in zip(row, numbers, strict=True))}</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def digits(value: object) -> str:
    """Floats with three digits, everything else as it is."""
    if not isinstance(value, float):
        return str(value)
    if not math.isfinite(value):
        return str(value)
    if value and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.2e}"
    return f"{value:,.{max(0, 2 - math.floor(math.log10(abs(value))))}f}" if value else "0"


def tiles(values: Mapping[str, str]) -> str:
    """The most important numbers, large."""
    return f'<div class="tiles">{"".join(f"<div>{escape(k)}<b>{escape(v)}</b></div>" for k, v in values.items())}</div>'


def bars(rows: Mapping[str, Mapping[str, float]], unit: str) -> str:
    """A bar for each row, stacked from its parts, all to one scale, and a key with the parts' means."""
    names = sorted({n for row in rows.values() for n in row}, key=lambda n: -sum(r.get(n, 0.0) for r in rows.values()))
    longest = max((sum(row.values()) for row in rows.values()), default=0.0) or 1.0
    colour = {name: COLOURS[at % len(COLOURS)] for at, name in enumerate(names)}
    lines = []
    for label, row in rows.items():
        parts = "".join(
            f'<span style="width:{100 * row[name] / longest:.3f}%;background:{colour[name]}" '
            f'title="{escape(name)} {digits(row[name])} {escape(unit)}"></span>'
            for name in names if row.get(name)
        )  # fmt: skip
        lines.append(f'<div class="soft">{escape(label)}</div><div class="bar">{parts}</div>')
    means = {name: sum(row.get(name, 0.0) for row in rows.values()) / max(len(rows), 1) for name in names}
    key = "".join(
        f'<span style="white-space:nowrap"><span class="key" style="background:{colour[name]}"></span>{escape(name)} '
        f"{digits(means[name])} {escape(unit)}</span> "
        for name in names
    )
    return "".join(lines) + f"<p>{key}</p>"


def chart(curves: Mapping[str, Sequence[tuple[float, float]]], x: str, y: str) -> str:
    """Lines over a common x axis; numbers that are not finite leave gaps."""
    points = [p for curve in curves.values() for p in curve if math.isfinite(p[1])]
    if not points:
        return paragraph("nothing was recorded", "soft")
    (left, right), (low, high) = (_span([p[axis] for p in points]) for axis in (0, 1))
    width, height, margin = 720, 260, 78

    def at(point: tuple[float, float]) -> str:
        across = margin + (point[0] - left) / (right - left) * (width - margin - 10)
        return f"{across:.1f},{10 + (high - point[1]) / (high - low) * (height - 46):.1f}"

    drawn = [f'<svg viewBox="0 0 {width} {height}" role="img"><title>{escape(y)} over {escape(x)}</title>']
    for value in _ticks(low, high):
        line = 10 + (high - value) / (high - low) * (height - 46)
        drawn.append(
            f'<line x1="{margin}" x2="{width - 10}" y1="{line:.1f}" y2="{line:.1f}" stroke="var(--line)"/>'
            f'<text x="{margin - 6}" y="{line + 4:.1f}" text-anchor="end">{digits(value)}</text>'
        )
    for share, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
        across = margin + share * (width - margin - 10)
        label = f"{left + share * (right - left):,.0f}"
        drawn.append(f'<text x="{across:.1f}" y="{height - 20}" text-anchor="{anchor}">{label}</text>')
    drawn.append(f'<text x="{width / 2:.0f}" y="{height - 4}" text-anchor="middle">{escape(x)}</text>')
    for number, (name, curve) in enumerate(curves.items()):
        colour = COLOURS[number % len(COLOURS)]
        for piece in _pieces(curve):
            shown = " ".join(map(at, piece if len(piece) > 1 else piece * 2))
            cap = 'stroke-linecap="round" ' if len(piece) == 1 else ""
            drawn.append(
                f'<polyline points="{shown}" fill="none" stroke="{colour}" {cap}stroke-width="{2 if not cap else 6}">'
                f"<title>{escape(name)}</title></polyline>"
            )
    key = "".join(
        f'<span style="white-space:nowrap"><span class="key" style="background:{COLOURS[n % len(COLOURS)]}"></span>'
        f"{escape(name)}</span> "
        for n, name in enumerate(curves)
    )
    return f"<p><b>{escape(y)}</b> {key}</p>{''.join(drawn)}</svg>"


def picture(path: Path, label: str) -> str:
    """A PNG file as a part of the page."""
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<img alt="{escape(label)}" src="data:image/png;base64,{data}"/>'


def _span(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 0.5 * (abs(low) or 1), high + 0.5 * (abs(high) or 1))


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers, two to five of them."""
    size = 10.0 ** math.floor(math.log10((high - low) / 4))
    step = next(factor * size for factor in (1, 2, 5, 10) if 4 * factor * size >= high - low)
    return [step * number for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _pieces(curve: Sequence[tuple[float, float]]) -> list[list[tuple[float, float]]]:
    """The stretches of finite numbers."""
    found: list[list[tuple[float, float]]] = [[]]
    for point in curve:
        if math.isfinite(point[1]):
            found[-1].append(point)
        elif found[-1]:
            found.append([])
    return [piece for piece in found if piece]
