"""Disturbed jobs: their layouts, and their results by the kind of fault."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from megatron_core.planner.layout import Layout


def layout_of(case: str) -> Layout:
    """The layout in the name of a case, such as ``dp2, groups``."""
    return Layout.parse(case.split(",")[0])


@dataclass
class Seen:
    """Results of one kind of fault."""

    faults: int = 0
    named: int = 0
    """Number of recoveries whose message names the rank and the kind; of harmless faults, jobs without a
    recovery for them."""
    seconds: list[float] = field(default_factory=list)
    """Time from the detection to the next step."""


def table(seen: dict[str, Seen]) -> str:
    """The results as a Markdown table."""
    rows = ["| fault | number | named | median s | longest s |", "|---|---|---|---|---|"]
    for kind, own in sorted(seen.items()):
        times = own.seconds or [0.0]
        row = f"| `{kind}` | {own.faults} | {own.named} | {statistics.median(times):.1f} | {max(times):.1f} |"
        rows.append(row)
    return "\n".join(rows) + "\n"
