"""The checker detects every kind of fault; plans have a text form."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_core.errors import LayoutError
from megatron_core.features.pipeline_schedules.plan_file import parse_action
from megatron_core.schedules import SCHEDULES, interleaved, make_plan
from megatron_core.schedules.actions import Action
from megatron_core.schedules.checks import check_plan, plan_problems
from tests.schedules.plans import parse_plan

# Faults: (the ranks' actions of two stages and one or two micro-batches, micro-batches, the whole report).
FAULTS = {
    "nothing": (["0F0 0B0", "1F0 1B0"], 1, []),
    "missing": (["0F0", "1F0 1B0"], 1, ["0B0 is missing"]),
    "twice": (["0F0 0F0 0B0", "1F0 1B0"], 1, ["0F0 occurs 2 times"]),
    "unknown micro-batch": (["0F0 0F1 0B0", "1F0 1B0"], 1, ["0F1 is not part of this step"]),
    "wrong rank": (
        ["0F0 1F0 0B0", "1B0"],
        1,
        ["1F0 is on rank 0, but stage 1 is on rank 1"],
    ),
    "another sound order": (
        ["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"],
        2,
        [],
    ),
    "split and whole backwards": (
        ["0F0 0F1 0I0 0B1 0W0", "1F0 1B0 1F1 1I1 1W1"],
        2,
        [],
    ),
    "swapped messages": (
        ["0F0 0F1 0B1 0B0", "1F0 1B0 1F1 1B1"],
        2,
        ["rank 0 consumes 1B1 before 1B0, but rank 1 sends 1B0 first"],
    ),
    "weight gradient missing": (["0F0 0I0", "1F0 1B0"], 1, ["0W0 is missing"]),
    "input gradient missing": (
        ["0F0 0W0", "1F0 1B0"],
        1,
        ["0I0 is missing", "rank 0 waits forever before 0W0, which needs 0I0"],
    ),
    "split and whole at once": (
        ["0F0 0B0 0W0", "1F0 1B0"],
        1,
        [
            "the plan has both 0W0 and 0B0; a backward is either B, or I and W",
            "rank 0 waits forever before 0W0, which needs 0I0",
        ],
    ),
    "weight gradient twice": (["0F0 0I0 0W0 0W0", "1F0 1B0"], 1, ["0W0 occurs 2 times"]),
    "weight gradient before its input gradient": (
        ["0F0 0W0 0I0", "1F0 1B0"],
        1,
        ["rank 0 waits forever before 0W0, which needs 0I0"],
    ),
    "split backward too early": (
        ["0F0 0I0 0W0", "1I0 1F0 1W0"],
        1,
        ["rank 0 waits forever before 0I0, which needs 1I0", "rank 1 waits forever before 1I0, which needs 1F0"],
    ),
    "crossed waits": (
        ["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"],
        2,
        [
            "rank 0 waits forever before 0B0, which needs 1B0",
            "rank 1 waits forever before 1F1, which needs 0F1",
        ],
    ),
    "backward before its forward": (
        ["0F0 0B0", "1B0 1F0"],
        1,
        ["rank 0 waits forever before 0B0, which needs 1B0", "rank 1 waits forever before 1B0, which needs 1F0"],
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_report(fault: str) -> None:  # C32
    lines, micros, expected = FAULTS[fault]
    assert list(plan_problems(parse_plan(lines, (0, 1)), micros)) == expected


def test_stage_on_a_rank_that_is_not_there() -> None:
    found = list(plan_problems(parse_plan(["0F0 0B0"], (0, 1)), 1))
    assert "stage 1 is on rank 1, but the plan has ranks 0 to 0" in found
    assert "1F0 is missing" in found


def test_unknown_stage() -> None:
    found = list(plan_problems(parse_plan(["0F0 0B0 7F0", "1F0 1B0"], (0, 1)), 1))
    assert "7F0 is not part of this step" in found


def test_forward_only_has_no_backwards() -> None:
    plan = parse_plan(["0F0", "1F0"], (0, 1))
    assert check_plan(plan, 1, forward_only=True) is plan
    assert len(list(plan_problems(plan, 1))) == 2


def test_error_names_every_problem() -> None:
    with pytest.raises(LayoutError) as error:
        check_plan(parse_plan(["0F0", "1F0 1B0 1B0"], (0, 1)), 1)
    assert "0B0 is missing" in str(error.value) and "1B0 occurs 2 times" in str(error.value)


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(list(SCHEDULES)), st.integers(2, 4), st.integers(1, 6), st.data())
def test_damage_never_goes_unseen(name: str, ranks: int, micros: int, data: st.DataObject) -> None:
    """A valid plan with an action removed, duplicated or moved to another rank is not valid."""
    plan = make_plan(name, ranks, SCHEDULES[name].chunks or 2, micros)
    rank = data.draw(st.integers(0, ranks - 1))
    actions = list(plan.ranks[rank])
    at = data.draw(st.integers(0, len(actions) - 1))
    damaged = list(plan.ranks)
    kind = data.draw(st.sampled_from(["removed", "doubled", "moved"]))
    if kind == "doubled":
        damaged[rank] = (*actions[:at], actions[at], *actions[at:])
    else:
        damaged[rank] = (*actions[:at], *actions[at + 1 :])
    if kind == "moved":
        other = (rank + 1) % ranks
        damaged[other] = (actions[at], *damaged[other])
    assert list(plan_problems(replace(plan, ranks=tuple(damaged)), micros, forward_only=name == "forward_only"))


@given(st.integers(0, 10**6), st.sampled_from("FBIW"), st.integers(0, 10**6))
def test_action_survives_its_text(stage: int, kind: str, micro: int) -> None:
    action = Action(stage, kind, micro)
    assert parse_action(str(action)) == action
    assert parse_action(f" {action} ") == action


@pytest.mark.parametrize("text", ["", "F0", "0F", "0X0", "-1F0", "0F0B", "0 F0", "0f0"])
def test_what_is_no_action(text: str) -> None:
    with pytest.raises(LayoutError, match="not a pipeline action"):
        parse_action(text)


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 5))
def test_plan_survives_its_text(ranks: int, chunks: int, micros: int) -> None:
    plan = interleaved(ranks, chunks, micros)
    lines = [" ".join(map(str, actions)) for actions in plan.ranks]
    assert parse_plan(lines, plan.stage_to_rank) == plan


@settings(deadline=None, max_examples=30)
@given(st.sampled_from(list(SCHEDULES)), st.integers(1, 4), st.integers(1, 5))
def test_source_and_consumer_are_inverse(name: str, ranks: int, micros: int) -> None:
    plan = make_plan(name, ranks, SCHEDULES[name].chunks or 2, micros)
    for action in (action for actions in plan.ranks for action in actions):
        consumer = plan.consumer(action)
        assert consumer is None or plan.source(consumer) == action
        for receiver in range(ranks):
            sender = plan.stage_to_rank[action.stage]
            goes = consumer is not None and plan.stage_to_rank[consumer.stage] == receiver != sender
            assert (action in plan.messages(sender, receiver)) == goes
            assert not goes or plan.sender(consumer) == sender
