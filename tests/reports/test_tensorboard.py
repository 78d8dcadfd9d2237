"""TensorBoard's files hold Megatron-LM's tags."""

from __future__ import annotations

import math

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_core.reports.metric_sinks import TensorBoardSink
from tests.monitor.examples import step, validation


def scalars(folder) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tags_and_values(tmp_path):
    sink = TensorBoardSink(tmp_path)
    sink.on_step(step(1, loss=2.0))
    sink.on_step(step(2, loss=math.nan, grad_norm=None))
    sink.on_validation(validation(2, loss=0.0))
    sink.close()
    found = scalars(tmp_path)
    assert {
        "learning-rate",
        "batch-size",
        "lm loss",
        "lm loss vs samples",
        "loss-scale",
        "grad-norm",
        "iteration-time",
        "throughput",
        "lm loss validation",
        "lm loss validation ppl",
    } <= found.keys()
    assert found["lm loss"][0] == (1, 2.0) and math.isnan(found["lm loss"][1][1])
    assert found["lm loss vs samples"][0] == (4, 2.0)
    assert [step for step, _ in found["grad-norm"]] == [1]
    assert found["lm loss validation ppl"] == [(2, 1.0)]
    assert found["throughput"][0][1] == 2.5


def test_a_resumed_run_hides_the_steps_that_it_repeats(tmp_path):
    for start, losses in ((0, {1: 1.0, 2: 1.0, 3: 1.0}), (1, {2: 5.0})):
        sink = TensorBoardSink(tmp_path, start_iteration=start)
        for iteration, loss in losses.items():
            sink.on_step(step(iteration, loss=loss))
        sink.close()
    assert scalars(tmp_path)["lm loss"] == [(1, 1.0), (2, 5.0)]
