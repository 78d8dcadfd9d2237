"""Forwards and backwards that run together: plans, simulation, files and traces."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_core.errors import ConfigError, LayoutError
from megatron_core.features.pipeline_schedules.plan_file import plan_from_text
from megatron_core.features.pipeline_schedules.plans import dualpipe_v, zb_v
from megatron_core.planner.simulate import Costs, peak_activations, simulate
from megatron_core.reports.timelines import timeline_picture
from megatron_core.reports.trace_files import Recording, TraceWriter, measured_costs, read_trace
from megatron_core.schedules import SCHEDULES, make_plan, schedules
from megatron_core.schedules.actions import Action, Plan, format_turn
from megatron_core.schedules.checks import check_plan, plan_problems
from tests.schedules.plans import format_plan, parse_plan


def text(plan: Plan) -> list[str]:
    return [" ".join(map(format_turn, turns)) for turns in plan.turns]


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(list(schedules(in_pairs=True))), st.integers(1, 8), st.integers(2, 4), st.integers(1, 24))
def test_every_plan_in_pairs_is_sound(name: str, ranks: int, chunks: int, micros: int) -> None:  # C32
    chunks = SCHEDULES[name].chunks or chunks
    plan = check_plan(make_plan(name, ranks, chunks, micros, paired=True), micros)
    assert plan.receive_lookahead <= 3
    assert plan_from_text(format_plan(plan).splitlines()) == plan
    for turns in plan.turns:
        for turn in turns:
            assert len(turn) == 1 or (turn[0].stage, turn[0].micro) != (turn[1].stage, turn[1].micro)
        for stage in {action.stage for turn in turns for action in turn}:  # gradients are summed in the same order
            order = [a.micro for turn in turns for a in turn if a.stage == stage and a.kind in "BI"]
            assert order == list(range(micros))


def test_1f1b_in_pairs() -> None:
    assert text(make_plan("1f1b", 1, 1, 3, paired=True)) == ["0F0 0F1&0B0 0F2&0B1 0B2"]
    assert text(make_plan("1f1b", 2, 1, 4, paired=True)) == [
        "0F0 0F1 0F2 0F3&0B0 0B1 0B2 0B3",
        "1F0 1F1&1B0 1F2&1B1 1F3&1B2 1B3",
    ]
    plan = make_plan("1f1b", 4, 1, 16, paired=True)
    assert peak_activations(plan) == (8, 6, 4, 2)
    # One after the other, a pair takes the time of both: the makespan is that of 1F1B.
    assert simulate(plan, Costs()).makespan == simulate(make_plan("1f1b", 4, 1, 16), Costs()).makespan


def test_dualpipe_v_in_pairs() -> None:
    assert text(dualpipe_v(2, 4, paired=True)) == [
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3&3B1 3F2&0B0 3B2 3F3&0B1 3B3 0I2 0W2 0I3 0W3",
        "1F0 2F0 1F1 2F1 1F2 2B0 2F2&1B0 1F3&2B1 2F3&1B1 2B2 1B2 2I3 1I3 2W3 1W3",
    ]


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("exchange", [0.0, 0.25, 0.4])
@pytest.mark.parametrize("weights", [0.6, 1.0])
def test_the_bubble_of_dualpipe_v_is_that_of_its_authors(ranks: int, exchange: float, weights: float) -> None:
    """(p - 1) (F&B + B - 3W), table 2 of arXiv 2412.19437, for one chunk: half of a rank's layers."""
    costs = Costs(1.0, 1.0, weights, exchange=exchange)
    timeline = simulate(dualpipe_v(ranks, 4 * ranks, paired=True), costs)
    pair = (1 + 1 + weights - 2 * exchange) / 2
    bubble = (ranks - 1) * (pair + (1 + weights) / 2 - 3 * weights / 2)
    waits = [max(timeline.spans) - busy for busy in timeline.busy]
    assert max(waits) == pytest.approx(bubble, abs=1e-9)
    if not exchange:
        assert min(waits) == pytest.approx(bubble, abs=1e-9)


def test_pairs_pay_where_messages_between_experts_take_time() -> None:
    costs = Costs(exchange=0.3)
    found = [simulate(plan, costs).makespan for plan in (dualpipe_v(4, 16, paired=True), zb_v(4, 16))]
    assert found[0] < 0.9 * found[1]
    assert simulate(dualpipe_v(4, 16, paired=True), Costs()).makespan > simulate(zb_v(4, 16), Costs()).makespan


def test_time_of_a_pair() -> None:
    plan, pair = make_plan("1f1b", 1, 1, 2, paired=True), (Action(0, "F", 1), Action(0, "B", 0))
    assert Costs(1, 1, 1).pair_time(plan, *pair) == 3
    assert Costs(1, 1, 1, exchange=0.4).pair_time(plan, *pair) == pytest.approx(2.2)
    assert Costs(1, 1, 0.1, exchange=1).pair_time(plan, *pair) == 2, "messages follow one another"
    with pytest.raises(ConfigError, match="exchange between experts"):
        Costs(1, 0.2, 1, exchange=0.3)
    assert Costs.parse("1,1,1,0,0.4") == Costs(exchange=0.4)
    assert Costs.parse(Costs(exchange=0.4).text) == Costs(exchange=0.4)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("0F0&0F1 0B0 0B1", "not a pair"),
        ("0F0 0B0&0F1 0B1", "not a pair"),
        ("0F0&0B0", "0F0&0B0, which needs 0F0"),
        ("0F0 0F1&0B1 0B0", "0F1&0B1, which needs 0F1"),
    ],
)
def test_pairs_that_cannot_run(line: str, told: str) -> None:
    with pytest.raises(LayoutError, match=told):
        plan = plan_from_text([line])
        check_plan(plan, plan.num_microbatches)


def test_a_pair_without_a_backward() -> None:
    plan = parse_plan(["0F0 0I0 0W0 0F1 0B1"], (0,))
    sentence = next(plan_problems(Plan(plan.ranks, (0,), frozenset({Action(0, "F", 0)})), 2))
    assert sentence == "0F0&0I0 cannot run together; a pair is a forward, then a backward (B)"


def test_schedules_without_pairs() -> None:
    with pytest.raises(ConfigError, match="zb_v has no pairs of forward and backward; legal: 1f1b, interleaved, dual"):
        make_plan("zb_v", 2, 2, 4, paired=True)


def test_a_trace_of_pairs(tmp_path: Path) -> None:
    plan, now = make_plan("1f1b", 1, 1, 3, paired=True), [0.0]
    recording = Recording(lambda: now[0], lambda: 0.2 * now[0])
    for turn in plan.turns[0]:
        for action in turn:
            recording.begin(action)
        now[0] += 0.001 * (1 + len(turn))
        for action in turn:
            recording.end(action)
        now[0] += 0.001
    TraceWriter(tmp_path, 0, [0], "1f1b", (0,)).write(1, recording)
    timeline = read_trace(tmp_path).timelines[1]
    assert timeline.plan == plan
    assert timeline.busy == pytest.approx((10.0,)) and timeline.makespan == pytest.approx(13.0)
    (share,) = timeline.shares
    assert share == pytest.approx({"computation": 8 / 13, "collectives": 2 / 13, "idle": 3 / 13})
    costs = measured_costs(timeline)
    assert costs.pairs == pytest.approx({(0, 0): 3.0}) and costs.times == pytest.approx({(0, "F"): 2.0, (0, "B"): 2.0})
    assert simulate(plan, costs).makespan == pytest.approx(10.0)
    assert "F1B0" in timeline_picture(timeline, "pairs", width=60).replace("-", "")
