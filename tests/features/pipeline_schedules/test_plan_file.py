"""A user's plan in a text file."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_core.errors import LayoutError
from megatron_core.features.pipeline_schedules.plan_file import plan_from_text, read_plan
from megatron_core.features.pipeline_schedules.plans import zb_v
from megatron_core.schedules import SCHEDULES, make_plan, one_f_one_b
from megatron_core.schedules.actions import v_shaped_stages
from megatron_core.schedules.checks import check_plan
from tests.schedules.plans import format_plan


def test_file_with_comments(tmp_path: Path) -> None:
    path = tmp_path / "plan.txt"
    path.write_text("# 1F1B\n\n0F0 0F1 0B0 0B1  # the first rank\n   \n1F0 1B0 1F1 1B1\n")
    assert check_plan(read_plan(path), 2) == one_f_one_b(2, 2)


@pytest.mark.parametrize("header", ["stage_to_rank: v", "stage_to_rank: 0 1 1 0", "stage_to_rank:  0 1  1 0 # V"])
def test_placement(header: str) -> None:
    ranks = [" ".join(map(str, actions)) for actions in zb_v(2, 4).ranks]
    assert plan_from_text([header, *ranks]) == zb_v(2, 4)


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(list(SCHEDULES)), st.integers(1, 4), st.integers(1, 4))
def test_every_plan_survives_its_text(name: str, ranks: int, micros: int) -> None:
    plan = make_plan(name, ranks, SCHEDULES[name].chunks or 3, micros)
    assert plan_from_text(format_plan(plan).splitlines()) == plan


def test_text_of_a_plan() -> None:
    assert format_plan(one_f_one_b(2, 1)) == "stage_to_rank: round_robin\n0F0 0B0\n1F0 1B0\n"
    assert format_plan(zb_v(2, 1)).startswith("stage_to_rank: v\n")
    assert format_plan(plan_from_text(["stage_to_rank: 1 0", "1F0", "0F0"])) == "stage_to_rank: 1 0\n1F0\n0F0\n"
    assert plan_from_text(["stage_to_rank: v", "0F0 3F0", "1F0 2F0"]).stage_to_rank == v_shaped_stages(2)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["0F0", "1F0 1G0"], "mine:2: '1G0' is not a pipeline action"),
        (["0F0", "stage_to_rank: v"], "mine:2: stage_to_rank: belongs before the first rank's line"),
        (["# nothing"], "mine has no actions; write one line for each pipeline rank"),
        (["0F0", "1F0", "2F0 3F0"], "mine: 4 stages cannot be distributed round robin over 3 ranks"),
        (
            ["stage_to_rank: around", "0F0", "1F0"],
            "mine: stage_to_rank: 'around' is invalid; legal: round_robin, v, or the rank",
        ),
        (["stage_to_rank: 0 2", "0F0", "1F0"], r"or the rank \(0 to 1\) of each stage"),
        (["stage_to_rank:", "0F0"], "stage_to_rank: '' is invalid"),
    ],
)
def test_what_cannot_be_read(lines: list[str], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        plan_from_text(lines, "mine")


def test_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match=r"plan .*none.txt cannot be read"):
        read_plan(tmp_path / "none.txt")


def test_a_slip_of_the_finger_is_no_million_stages() -> None:
    with pytest.raises(LayoutError, match="4 actions, but mentions stage 9000000"):
        plan_from_text(["0F0 9000000F0 0B0 9000000B0"])
