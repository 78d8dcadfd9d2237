"""Every schedule is valid for every size, and stores no more activations than documented."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_core.errors import ConfigError
from megatron_core.features.pipeline_schedules.plans import dualpipe_v, gpipe, zb_h1, zb_h2, zb_v
from megatron_core.schedules import SCHEDULES, forward_only, interleaved, make_plan, one_f_one_b
from megatron_core.schedules.actions import Action, Plan, round_robin_stages, v_shaped_stages
from megatron_core.schedules.checks import check_plan

RANKS, CHUNKS, MICROS = st.integers(1, 8), st.integers(1, 4), st.integers(1, 32)


def in_flight(actions: tuple[Action, ...]) -> int:
    """Maximal number of forwards without their backward."""
    return max(accumulate(1 if action.kind == "F" else -1 for action in actions))


def text(plan: Plan) -> list[str]:
    return [" ".join(map(str, actions)) for actions in plan.ranks]


@pytest.mark.parametrize("name", SCHEDULES)
@settings(deadline=None, max_examples=25)
@given(RANKS, CHUNKS, MICROS)
def test_every_plan_is_sound(name: str, ranks: int, chunks: int, micros: int) -> None:  # C32
    """Complete, without deadlock with blocking and non-blocking sends, and with a valid plan for evaluation."""
    chunks = SCHEDULES[name].chunks or chunks
    plan = check_plan(make_plan(name, ranks, chunks, micros), micros, forward_only=name == "forward_only")
    assert (plan.num_stages, plan.num_microbatches, plan.num_chunks) == (ranks * chunks, micros, chunks)
    assert plan.receive_lookahead <= 3
    check_plan(forward_only(ranks, chunks, micros, stage_to_rank=plan.stage_to_rank), micros, forward_only=True)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("micros", [1, 2, 3, 4, 5, 8, 9])
def test_difficult_numbers_of_micro_batches(name: str, micros: int) -> None:  # C32
    """m < p, m = p, m % p != 0, m = 1."""
    for ranks in (2, 3, 4, 8):
        for chunks in (1, 2, 3) if SCHEDULES[name].chunks is None else (SCHEDULES[name].chunks,):
            plan = make_plan(name, ranks, chunks, micros)
            assert check_plan(plan, micros, forward_only=name == "forward_only") is plan


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_table_says_who_splits_backwards(name: str) -> None:
    plan = make_plan(name, 4, SCHEDULES[name].chunks or 2, 8)
    present = {action.kind for actions in plan.ranks for action in actions}
    assert ("W" in present) == ("I" in present) == SCHEDULES[name].splits_backward


@settings(deadline=None, max_examples=40)
@given(RANKS, MICROS)
def test_1f1b_holds_at_most_p_minus_r(ranks: int, micros: int) -> None:
    for rank, actions in enumerate(one_f_one_b(ranks, micros).ranks):
        assert in_flight(actions) == min(ranks - rank, micros)


@settings(deadline=None, max_examples=40)
@given(RANKS, st.integers(2, 4), MICROS)
def test_interleaving_holds_at_most_its_warm_up(ranks: int, chunks: int, micros: int) -> None:
    """2 (p - r - 1) + (v - 1) p forwards ahead, and one more before the first backward."""
    for rank, actions in enumerate(interleaved(ranks, chunks, micros).ranks):
        assert in_flight(actions) <= 2 * (ranks - rank - 1) + (chunks - 1) * ranks + 1


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(list(SCHEDULES)), RANKS, CHUNKS, MICROS)
def test_each_stage_takes_micro_batches_in_order(name: str, ranks: int, chunks: int, micros: int) -> None:
    """Backwards have the order of forwards, so that gradients are summed in the same order in every schedule."""
    kinds = ("F",) if name == "forward_only" else ("F", "BI", "BW")
    for actions in make_plan(name, ranks, SCHEDULES[name].chunks or chunks, micros).ranks:
        for kind in kinds:
            for stage in {action.stage for action in actions}:
                order = [a.micro for a in actions if a.stage == stage and a.kind in kind]
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
    assert round_robin_stages(3, 2) == (0, 1, 2, 0, 1, 2)


def test_v() -> None:
    assert v_shaped_stages(3) == (0, 1, 2, 2, 1, 0)
    assert zb_v(3, 1).stage_to_rank == dualpipe_v(3, 1).stage_to_rank == v_shaped_stages(3)
    assert zb_v(3, 1).chunks == (0, 0, 0, 1, 1, 1)


def test_evaluation_on_a_v() -> None:
    assert text(forward_only(2, 2, 2, stage_to_rank=v_shaped_stages(2))) == ["0F0 0F1 3F0 3F1", "1F0 2F0 1F1 2F1"]


def test_gpipe() -> None:
    assert text(gpipe(2, 2)) == ["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"]


def test_zb_h1_of_four_ranks() -> None:
    """The forwards of 1F1B; the weight gradients of rank r are delayed by r micro-batches."""
    assert text(zb_h1(4, 4)) == [
        "0F0 0F1 0F2 0F3 0I0 0W0 0I1 0W1 0I2 0W2 0I3 0W3",
        "1F0 1F1 1F2 1I0 1F3 1I1 1W0 1I2 1W1 1I3 1W2 1W3",
        "2F0 2F1 2I0 2F2 2I1 2F3 2I2 2W0 2I3 2W1 2W2 2W3",
        "3F0 3I0 3F1 3I1 3F2 3I2 3F3 3I3 3W0 3W1 3W2 3W3",
    ]


def test_zb_h2_of_two_ranks() -> None:
    assert text(zb_h2(2, 4)) == [
        "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3",
        "1F0 1I0 1F1 1I1 1F2 1I2 1W0 1F3 1I3 1W1 1W2 1W3",
    ]


def test_zb_v_of_two_ranks() -> None:
    assert text(zb_v(2, 4)) == [
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3",
        "1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3",
    ]


def test_dualpipe_v_of_two_ranks() -> None:
    """The eight steps of DualPipeV's code."""
    assert text(dualpipe_v(2, 4)) == [
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 3B2 3F3 0B1 3B3 0I2 0W2 0I3 0W3",
        "1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 2B2 1B2 2I3 1I3 2W3 1W3",
    ]


def test_unknown_schedule() -> None:
    with pytest.raises(ConfigError, match="pipeline_schedule='zbh1' is not a schedule; legal: 1f1b, interleaved,"):
        make_plan("zbh1", 4, 1, 8)


def test_wrong_number_of_chunks() -> None:
    with pytest.raises(ConfigError, match=r"zb_v cannot have 3 chunks on each rank; legal: 2\. With 3: interleaved"):
        make_plan("zb_v", 4, 3, 8)


@pytest.mark.parametrize("sizes", [(0, 1, 8), (4, 0, 8), (4, 1, 0)])
def test_sizes_below_one(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigError, match="= 0; legal: 1 or more"):
        make_plan("interleaved", *sizes)
