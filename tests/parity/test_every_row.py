"""The sample of the default run covers all kinds of rows, and all rows can be trained."""

from __future__ import annotations

from megatron_core.config import RunConfig
from megatron_core.config.validate import problems
from tests.parity.every_row import EVERY_ROW, SAMPLE, cover, drawn, shown_by
from tests.parity.rows import BASE


def test_whatever_a_row_has_a_row_of_the_sample_has() -> None:
    shown = set().union(*map(shown_by, SAMPLE))
    assert {row: shown_by(row) - shown for row in EVERY_ROW if not shown_by(row) <= shown} == {}
    assert set(drawn(EVERY_ROW)) >= SAMPLE and len(SAMPLE) < len(EVERY_ROW) / 3


def test_a_cover_is_cheap() -> None:
    shows = {"a": {1, 2}, "b": {2, 3}, "c": {1, 2, 3}, "d": {4}}
    assert cover(shows, lambda name: 1) == {"c", "d"}
    assert cover(shows, {"a": 1, "b": 1, "c": 9, "d": 1}.__getitem__) == {"a", "b", "d"}
    assert cover(shows, lambda name: 1, ["a"]) >= {"a", "d"}


def test_every_row_can_be_trained() -> None:
    """Errors in rows outside of the sample would otherwise go unnoticed until the whole matrix runs."""
    found = {
        row: list(problems(RunConfig.from_flat(BASE | model | layout), ranks))
        for row, (ranks, model, layout) in EVERY_ROW.items()
    }
    assert {row: faults for row, faults in found.items() if faults} == {}
