"""Timelines as text and as a trace."""

from __future__ import annotations

import re

import pytest

from megatron_core.features.pipeline_schedules.plan_file import parse_action
from megatron_core.features.pipeline_schedules.plans import zb_v
from megatron_core.planner.simulate import Costs, simulate
from megatron_core.reports.timelines import COLOURS, chrome_trace, shade, timeline_picture
from megatron_core.schedules import SCHEDULES, make_plan, one_f_one_b


def test_plain_picture() -> None:
    assert timeline_picture(simulate(one_f_one_b(2, 2), Costs()), "1f1b", width=40).splitlines() == [
        "1f1b",
        " " * 34 + " peak",
        "rank 0 F0-F1-......B0----...B1---- 2",
        "rank 1 ...F0-B0----F1-B1----...... 1",
        "F forward, B backward",
        "bubble 33.3%, idle 33.3%, makespan 9, peak activations 2 micro-batches",
    ]


def test_odd_chunks_are_in_lower_case() -> None:
    lines = timeline_picture(simulate(zb_v(1, 2), Costs()), "", width=60).splitlines()
    assert lines[2].split()[2].startswith("F0")
    assert "f0" in lines[2] and "odd chunks in lower case" in lines[3]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("colour", [False, True])
@pytest.mark.parametrize("width", [10, 80, 400])
def test_rows_have_the_same_width(name: str, colour: bool, width: int) -> None:
    """For any width of the terminal and any costs."""
    timeline = simulate(make_plan(name, 4, SCHEDULES[name].chunks or 2, 6), Costs(1.3, 1, 0.7, 0.2))
    text = re.sub(r"\x1b\[[0-9;]*m", "", timeline_picture(timeline, name, width=width, colour=colour))
    rows = [line.rsplit(" ", 1)[0] for line in text.splitlines() if line.startswith("rank")]
    assert len({len(row) for row in rows}) == 1 and len(rows) == 4
    assert width < 80 or max(map(len, text.splitlines()[:-2])) <= width


def test_colours() -> None:
    text = timeline_picture(simulate(zb_v(2, 2), Costs()), "", width=100, colour=True)
    shades = [shade(COLOURS[kind], chunk, 2) for kind in "FIW" for chunk in (0, 1)]
    assert len(set(shades)) == 6 and shade(COLOURS["F"], 0, 1) == COLOURS["F"]
    assert len(set(re.findall(r"48;5;(\d+)m", text))) == 6, "six colours in the terminal, too"
    assert "later chunks paler" in text


def test_chrome_trace() -> None:
    timeline = simulate(one_f_one_b(2, 1), Costs(1, 2, 3, 0.5))
    events = [event for event in chrome_trace(timeline)["traceEvents"] if event["ph"] == "X"]
    assert [event["name"] for event in events] == ["0F0", "0B0", "1F0", "1B0"]
    assert [(event["ts"], event["dur"]) for event in events] == [(0, 1000), (8000, 5000), (1500, 1000), (2500, 5000)]
    assert [(event["pid"], event["tid"]) for event in events] == [(0, 0), (0, 0), (1, 1), (1, 1)]
    for event in events:
        action = parse_action(event["name"])
        assert event["args"] == {"stage": action.stage, "micro": action.micro, "chunk": 0}
    assert len(chrome_trace(timeline)["traceEvents"]) == 4 + 2, "and the ranks' names"
