"""--trace-pipeline in a training run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megatron_core.pipeline_parallel.executor import Listener
from megatron_core.reports.pipeline_trace import PipelineTrace, clock_of
from megatron_core.reports.trace_files import MOST_STEPS, read_trace
from megatron_core.training.callbacks import Callbacks
from megatron_core.training.setup import Run
from megatron_core.training.step import evaluate, train_step
from megatron_core.verify.ranks import run_ranks
from tests.runs import tiny_run

ZB_V = {"num_layers": 4, "pipeline_model_parallel_size": 2, "pipeline_schedule": "zb_v", "global_batch_size": 16}


def _step(run: Run, called: Callbacks) -> float:
    """Take a step with callbacks; its loss."""
    result = train_step(run, hooks=called.step_hooks)
    called.call("after_step", result)
    return result.loss


def _train(settings: dict) -> tuple[list[float], list[str]]:
    """Losses of three steps with an evaluation between them, and this rank's plan."""
    run = tiny_run(**settings)
    called = Callbacks(run, [PipelineTrace(run)] if "trace_pipeline" in settings else [])
    with called.running():
        losses = [_step(run, called) for _ in range(2)]
        evaluate(run, run.splits.valid, 1)
        losses.append(_step(run, called))
    plan = run.plans.training(run.step_after(0).num_microbatches)
    return losses, [str(action) for action in plan.ranks[run.groups.index("pp")]]


def test_every_rank_traces_its_training_steps(tmp_path: Path) -> None:
    """Two pipelines; the trace has the executed actions, and tracing changes nothing."""
    found = run_ranks(4, _train, ZB_V | {"trace_pipeline": str(tmp_path / "new" / "traces")})
    assert found == run_ranks(4, _train, ZB_V), "equal to the bit"
    for rank in range(4):
        measured = read_trace(tmp_path / "new" / "traces", rank)
        assert list(measured.timelines) == [1, 2, 3] and measured.schedule == "zb_v"
        assert measured.typical in (1, 2, 3)
        plan = measured.timelines[2].plan
        assert [str(action) for action in plan.ranks[rank // 2]] == found[rank][1]
        for timeline in measured.timelines.values():
            assert all(timeline.start[a] < timeline.end[a] for a in timeline.start)
            needed = ((need, a) for a in timeline.start for need in plan.needs(a))
            assert all(timeline.end[need] <= timeline.start[a] + 1e-3 for need, a in needed), "one clock"
    lines = (tmp_path / "new" / "traces" / "rank00002.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["pipeline"] == [0, 2]


def test_no_trace_no_listener(tmp_path: Path) -> None:
    run, listener = tiny_run(trace_pipeline=str(tmp_path)), Listener()
    trace = PipelineTrace(run)
    callbacks = Callbacks(run, [trace])

    def listener_in_plan() -> Listener:
        with callbacks.step_hooks.around_plan(listener) as in_plan:
            return in_plan

    assert listener_in_plan() is listener, "a run without callbacks"
    with callbacks.running():
        for _ in range(MOST_STEPS):
            in_plan = listener_in_plan()
            assert in_plan is not listener and in_plan.on_last_weights is listener.on_last_weights
            trace._write()
        assert listener_in_plan() is listener, "a full trace costs nothing more"


def test_the_trace_names_the_plans_file(tmp_path: Path) -> None:
    plan = tmp_path / "mine.txt"
    plan.write_text("0F0 0F1 0B0 0B1\n")
    run = tiny_run(pipeline_plan=str(plan), trace_pipeline=str(tmp_path / "traces"), global_batch_size=4)
    called = Callbacks(run, [PipelineTrace(run)])
    with called.running():
        _step(run, called)
    measured = read_trace(tmp_path / "traces")
    assert measured.schedule == "mine.txt" and measured.timelines[1].bubble < 0.5


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_the_clock_waits_for_the_work() -> None:
    device = torch.device("cuda", 0)
    clock = clock_of(device)
    began = clock()
    torch.cuda._sleep(2**31)  # cycles, about a second; the call returns at once
    assert clock() - began > 0.2
