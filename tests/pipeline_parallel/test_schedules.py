"""Every schedule is sound for every size, and holds no more than it says."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_core.pipeline_parallel.actions import Action, Plan, placed_round_robin
from megatron_core.pipeline_parallel.checks import check
from megatron_core.pipeline_parallel.schedules import forward_only, interleaved, one_f_one_b

RANKS, CHUNKS, MICROS = st.integers(1, 8), st.integers(1, 4), st.integers(1, 32)


def in_flight(actions: tuple[Action, ...]) -> int:
    """Most forwards whose backward has not run yet."""
    return max(accumulate(1 if action.kind == "F" else -1 for action in actions))


def text(plan: Plan) -> list[str]:
    return [" ".join(map(str, actions)) for actions in plan.ranks]


@settings(deadline=None, max_examples=40)
@given(RANKS, CHUNKS, MICROS)
def test_every_plan_is_sound(ranks: int, chunks: int, micros: int) -> None:  # C32
    plan = check(interleaved(ranks, chunks, micros), micros)
    assert plan.num_stages == ranks * chunks
    check(forward_only(ranks, chunks, micros), micros, forward_only=True)


@pytest.mark.parametrize("micros", [1, 2, 3, 4, 5, 8, 9])
def test_difficult_numbers_of_micro_batches(micros: int) -> None:  # C32
    """m < p, m = p, m % p != 0, m = 1."""
    for ranks in (2, 3, 4, 8):
        for chunks in (1, 2, 3):
            check(interleaved(ranks, chunks, micros), micros)


@settings(deadline=None, max_examples=40)
@given(RANKS, MICROS)
def test_1f1b_holds_at_most_p_minus_r(ranks: int, micros: int) -> None:
    for rank, actions in enumerate(one_f_one_b(ranks, micros).ranks):
        assert in_flight(actions) == min(ranks - rank, micros)


@settings(deadline=None, max_examples=40)
@given(RANKS, st.integers(2, 4), MICROS)
def test_interleaving_holds_at_most_its_warm_up(ranks: int, chunks: int, micros: int) -> None:
    """2 (p - r - 1) + (v - 1) p forwards ahead, and the one that a backward follows."""
    for rank, actions in enumerate(interleaved(ranks, chunks, micros).ranks):
        assert in_flight(actions) <= 2 * (ranks - rank - 1) + (chunks - 1) * ranks + 1


@settings(deadline=None, max_examples=40)
@given(RANKS, CHUNKS, MICROS)
def test_each_stage_takes_micro_batches_in_order(ranks: int, chunks: int, micros: int) -> None:
    """So that gradients are summed in the same order whatever the schedule."""
    for actions in interleaved(ranks, chunks, micros).ranks:
        for kind in "FB":
            for stage in {action.stage for action in actions}:
                order = [a.micro for a in actions if (a.stage, a.kind) == (stage, kind)]
                assert order == list(range(micros))


def test_1f1b_of_two_ranks() -> None:
    assert text(one_f_one_b(2, 3)) == ["0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"]


def test_1f1b_of_four_ranks() -> None:
    """The drawing of 1F1B in the papers: 3, 2, 1 and 0 forwards ahead."""
    assert text(one_f_one_b(4, 5)) == [
        "0F0 0F1 0F2 0F3 0B0 0F4 0B1 0B2 0B3 0B4",
        "1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1B3 1B4",
        "2F0 2F1 2B0 2F2 2B1 2F3 2B2 2F4 2B3 2B4",
        "3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4",
    ]


def test_fewer_micro_batches_than_ranks() -> None:
    assert text(one_f_one_b(4, 1)) == ["0F0 0B0", "1F0 1B0", "2F0 2B0", "3F0 3B0"]


def test_two_chunks_on_two_ranks() -> None:
    """Megatron-LM's order: pairs of micro-batches through the first chunk, then through the second."""
    assert text(interleaved(2, 2, 4)) == [
        "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
        "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
    ]


def test_surplus_micro_batches_are_left_out() -> None:
    assert text(interleaved(2, 2, 3)) == [
        "0F0 0F1 2F0 2F1 0F2 2B0 2B1 2F2 0B0 0B1 2B2 0B2",
        "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1B1 3F2 3B2 1B2",
    ]


def test_evaluation_of_two_chunks() -> None:
    assert text(forward_only(2, 2, 2)) == ["0F0 0F1 2F0 2F1", "1F0 1F1 3F0 3F1"]


def test_stages_go_round() -> None:
    assert placed_round_robin(3, 2) == (0, 1, 2, 0, 1, 2)
