"""The contents of pictures of pipeline timelines, not their style."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_core.planner.simulate import Costs, Timeline, simulate
from megatron_core.reports import plot as plot_module
from megatron_core.reports.plot import plot_timelines
from megatron_core.schedules import make_plan


@pytest.fixture
def figures(monkeypatch):
    """The created figures, to inspect their contents."""
    made = []
    new_figure = plot_module._new_figure

    def keep(*size):
        made.append(new_figure(*size))
        return made[-1]

    monkeypatch.setattr(plot_module, "_new_figure", keep)
    return made


def timeline(name: str, chunks: int, micros: int = 4) -> Timeline:
    return simulate(make_plan(name, 2, chunks, micros), Costs())


def test_a_panel_for_each_timeline(tmp_path: Path, figures) -> None:
    path = tmp_path / "new" / "picture.png"
    plot_timelines([("one", timeline("1f1b", 1)), ("two", timeline("zb_v", 2))], path, unit="ms")
    assert path.read_bytes().startswith(b"\x89PNG")
    figure = figures[0]
    first, second = figure.axes
    assert (first.get_title(loc="left"), second.get_title(loc="left")) == ("one", "two")
    assert first.get_title(loc="right") == "bubble 20.0%    idle 20.0%    makespan 15"
    assert first.get_xlim() == second.get_xlim() == (0, 15)
    assert [label.get_text() for label in first.get_yticklabels()] == ["rank 0", "rank 1"]
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend[:4] == ["forward", "backward", "input gradient", "weight gradient"]
    assert "paler: later chunk" in legend and second.get_xlabel() == "time (ms)"


def test_numbers_where_they_fit(tmp_path: Path, figures) -> None:
    plot_timelines([("few", timeline("1f1b", 1, 2))], tmp_path / "few.png")
    plot_timelines([("many", timeline("1f1b", 1, 400))], tmp_path / "many.png")
    (few,), (many,) = (figure.axes for figure in figures)
    assert sorted(text.get_text() for text in few.texts) == sorted([*"01" * 4, "peak", "2", "1"])
    assert [text.get_text() for text in many.texts] == ["peak", "2", "1"]
