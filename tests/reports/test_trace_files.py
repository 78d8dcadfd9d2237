"""Measured timelines: written traces can be read, and the executor runs every schedule like the simulator."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_core.errors import ConfigError, LayoutError
from megatron_core.planner.simulate import Costs, StageCosts, Timeline, simulate
from megatron_core.reports.trace_files import MOST_STEPS, Recording, TraceWriter, measured_costs, read_trace
from megatron_core.schedules import SCHEDULES, make_plan
from megatron_core.schedules.actions import Action, Plan
from megatron_core.verify.ranks import run_ranks
from tests.schedules.sleepers import trace_sleeps, undisturbed

RANKS, MICROS, STEPS = 4, 8, 4
ACTION_SECONDS = 0.015
# Between two actions the executor passes messages and reads the clock, 0.03 to 0.1 ms on an idle machine, and a message
# over gloo takes 0.1 to 0.3 ms: together about 1 % of an action, also in a schedule without bubble.
BOUND = 0.02
# On a slow or busy machine it takes longer, but does not grow with the work: the next attempt's actions are twice as
# long. The delay of an executor that waits unnecessarily also doubles, and is detected in each attempt.
MOST_ATTEMPTS = 5
PLANS = {
    name: make_plan(name, RANKS, schedule.chunks or 2, MICROS)
    for name, schedule in SCHEDULES.items()
    if name != "forward_only"
}


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of traces per schedule, run by four ranks that sleep, for which two cores are sufficient."""
    folder = tmp_path_factory.mktemp("traces")
    run_ranks(RANKS, trace_sleeps, folder, PLANS, ACTION_SECONDS, STEPS)
    return folder


@pytest.mark.parametrize("name", PLANS)
def test_executed_bubble_is_the_simulated_one(name: str, traces: Path) -> None:
    measured = read_trace(traces / name)
    assert measured.schedule == name and len(measured.timelines) == STEPS
    simulated = simulate(PLANS[name], Costs())
    expected = pytest.approx((simulated.bubble, simulated.idle), abs=BOUND)
    ran = undisturbed(measured.timelines.values())
    for attempt in range(1, MOST_ATTEMPTS):
        if (ran.bubble, ran.idle) == expected:
            break
        again = traces / f"attempt{attempt}"
        run_ranks(RANKS, trace_sleeps, again, {name: PLANS[name]}, ACTION_SECONDS * 2**attempt, STEPS)
        ran = undisturbed(read_trace(again / name).timelines.values())
    assert (ran.bubble, ran.idle) == expected
    assert ran.plan == PLANS[name], "each rank ran its list in order"


def test_sleeps_are_measured_as_long_as_they_are(traces: Path) -> None:
    """B is I and W; load on the machine makes a sleep longer, never shorter."""
    times = measured_costs(undisturbed(read_trace(traces / "dualpipe_v").timelines.values())).times
    assert {kind for _, kind in times} == set("FBIW")
    for (_, kind), time in times.items():
        expected = 1000 * ACTION_SECONDS * (2 if kind == "B" else 1)
        assert expected <= time < 1.1 * expected


def test_an_executor_that_waits_is_seen() -> None:
    """Delays in every step are kept, delays in some steps are removed: the measure of the previous test detects
    errors."""
    plan = make_plan("1f1b", 2, 1, 4)
    good = simulate(plan, Costs())
    late = {Action(0, "F", 3): 5.0}
    disturbed = [_delayed(good, {action: 3.0}) for action in (Action(1, "F", 0), Action(0, "B", 1))]
    assert undisturbed([*disturbed, good]).bubble == pytest.approx(good.bubble)
    assert undisturbed([_delayed(good, late)] * 3).bubble > good.bubble + 0.05


def _delayed(timeline: Timeline, delays: dict[Action, float]) -> Timeline:
    """The timeline with some actions and all of their dependents delayed."""
    start, end = {}, {}
    free = dict.fromkeys(range(len(timeline.plan.ranks)), 0.0)
    for rank, action in ((rank, action) for rank, turn in timeline.plan.walk() for action in turn):
        soonest = max([free[rank], *(end[need] for need in timeline.plan.needs(action))])
        start[action] = soonest + delays.get(action, 0.0)
        end[action] = free[rank] = start[action] + timeline.end[action] - timeline.start[action]
    return Timeline(timeline.plan, start, end)


def _ticks(*times: float) -> Iterator[float]:
    return iter(times)


def _write(folder: Path, plan: Plan, *, hosts: tuple[str, str] = ("a", "a"), began: tuple[float, float] = (5.0, 5.5)):
    """One step of a plan of two ranks; every action takes a second, without waiting."""
    for rank, actions in enumerate(plan.ranks):
        writer = TraceWriter(folder, rank, [0, 1], "mine", plan.stage_to_rank)
        ticks = (began[rank] + at for at in range(2 * len(actions)))
        recording = Recording(_ticks(began[rank], *ticks).__next__)
        for action in actions:
            recording.begin(action)
            recording.end(action)
        writer.write(7, recording)
        path = folder / f"rank{rank:05d}.jsonl"
        header, *steps = path.read_text().splitlines(keepends=True)
        path.write_text(json.dumps(json.loads(header) | {"host": hosts[rank]}) + "\n" + "".join(steps))


def test_times_of_one_host_are_on_one_clock(tmp_path: Path) -> None:
    plan = make_plan("1f1b", 2, 1, 1)
    _write(tmp_path, plan)
    measured = read_trace(tmp_path, rank=1)
    timeline = measured.timelines[7]
    assert (measured.schedule, measured.typical, timeline.plan) == ("mine", 7, plan)
    assert {str(action): time for action, time in timeline.start.items()} == {
        "0F0": 0,
        "0B0": 2000,
        "1F0": 500,
        "1B0": 2500,
    }
    assert timeline.end[Action(1, "B", 0)] == 3500


def test_hosts_are_aligned_where_the_step_begins(tmp_path: Path) -> None:
    """Their clocks start with the processes."""
    _write(tmp_path, make_plan("1f1b", 2, 1, 1), hosts=("a", "b"), began=(5.0, 90000.0))
    timeline = read_trace(tmp_path).timelines[7]
    assert timeline.start[Action(0, "F", 0)] == timeline.start[Action(1, "F", 0)] == 0


def test_a_trace_is_bounded(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path, 0, [0], "1f1b", [0])
    for step in range(MOST_STEPS):
        assert not writer.is_full
        writer.write(step, Recording(lambda: 0.0))
    assert writer.is_full
    assert len((tmp_path / "rank00000.jsonl").read_text().splitlines()) == 1 + MOST_STEPS


def test_costs_are_means_by_stage_and_kind() -> None:
    """With these costs, a simulated plan of unequal stages reproduces its times."""
    plan = make_plan("zb_v", 2, 2, 6)
    times = {(stage, kind): 1.0 + stage + 0.25 * "FIW".index(kind) for stage in range(4) for kind in "FIW"}
    timeline = simulate(plan, StageCosts(times, comm=0.125))
    costs = measured_costs(timeline)
    assert costs.times == pytest.approx(times)
    assert costs.comm == pytest.approx(0.125)
    assert costs.text.startswith("0F 1, 0I 1.25, 0W 1.5, 1F 2") and costs.text.endswith("COMM 0.125")
    assert simulate(plan, costs).makespan == pytest.approx(timeline.makespan)


def test_unequal_stages_of_costs() -> None:
    """With equal stages both kinds of cost agree."""
    plan = make_plan("interleaved", 2, 2, 4)
    whole = simulate(plan, Costs(2, 3, 4, 1))
    each = simulate(plan, StageCosts({(stage, kind): t for stage in range(4) for kind, t in (("F", 1), ("B", 3.5))}, 1))
    assert each.start == whole.start and each.end == whole.end


def test_files_that_are_no_trace(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rank00000.jsonl is not a pipeline trace: .* --trace-pipeline"):
        read_trace(tmp_path)
    plan = make_plan("1f1b", 2, 1, 1)
    _write(tmp_path, plan)
    second = tmp_path / "rank00001.jsonl"
    header, step = second.read_text().splitlines()
    for text, told in (
        ("{}", "line 1 has no valid value of rank, pipeline, schedule, stage_to_rank, host"),
        ("[]", "line 1 has no valid value of an object"),
        (header.replace("[0, 1]", "null"), "line 1 has no valid value of pipeline, stage_to_rank"),
        (f"{header}\n{step.replace('5.5', 'NaN')}", "line 2 has no valid value of began"),
        (f"{header}\n{step.replace('[[', '[1, [')}", "line 2 has no valid value of actions"),
        (header.replace("mine", "other"), "is of another run than"),
        (header, "no step that all ranks finished"),
        (f"{header}\n{step[:40]}", "is not a pipeline trace"),
    ):
        second.write_text(text)
        with pytest.raises(ConfigError, match=told):
            read_trace(tmp_path)
    second.write_text(f"{header}\n{step.replace('1B0', '1B1')}")
    with pytest.raises(LayoutError, match="1B0 is missing"):
        read_trace(tmp_path)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"trace_pipeline='.*file' cannot be written"):
        TraceWriter(tmp_path / "file", 0, [0], "1f1b", [0])
