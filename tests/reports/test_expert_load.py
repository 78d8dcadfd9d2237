"""The load report: figures by hand, the note on a starved expert, and the output of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_core.errors import DataError
from megatron_core.monitor.events import ExpertLoad
from megatron_core.monitor.sinks import JsonLinesSink
from megatron_core.reports.checks import RunChecks, StarvedExperts
from megatron_core.reports.metrics import STARVED_STEPS
from megatron_core.reports.plot import expert_loads, plot_expert_load
from megatron_core.training.built_in_callbacks import Reports
from megatron_core.training.step import train_step
from tests.monitor.examples import step
from tests.runs import tiny_run


def test_figures_by_hand() -> None:
    even, one = ExpertLoad.of([8, 8, 8, 8, 3]), ExpertLoad.of([32, 0, 0, 0, 0])
    assert (even.max_over_mean, even.entropy, even.dropped) == (1.0, pytest.approx(1.0), 3)
    assert (one.max_over_mean, one.entropy) == (4.0, 0.0)
    assert ExpertLoad.of([2, 2, 0, 0, 0]).entropy == pytest.approx(0.5)
    assert (ExpertLoad.of([0, 0, 0]).max_over_mean, ExpertLoad.of([0, 0, 0]).entropy) == (1.0, 1.0)


def test_a_starved_expert_is_named_once_until_it_recovers() -> None:
    watch, starving, sound = StarvedExperts(), {3: [100, 100, 3, 100, 0]}, {3: [100, 100, 100, 100, 0]}
    for _ in range(2):
        found = [watch.after_step(starving) for _ in range(STARVED_STEPS + 3)]
        assert [sentences for sentences in found if sentences] == [["layer 3: expert 2"]]
        assert watch.after_step(sound) == []


def test_a_run_reports_the_load_of_every_layer(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Every choice of an unmasked token is counted; with all tokens sent to one expert for 20 steps, the others are
    named."""
    experts = {"num_experts": 4, "disable_bias_linear": True, "moe_expert_capacity_factor": 0.5, "train_iters": 99}
    experts["record_times"] = False
    run = tiny_run(**experts, moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True)
    for stage in run.stages.values():
        stage.decoder.layers["1"].mlp.router.expert_bias.data[0] = 100.0
    sink, checks = JsonLinesSink(tmp_path / "metrics.jsonl"), RunChecks(run)
    reports = Reports(run, [sink])
    for _ in range(STARVED_STEPS):
        reports.before_step()
        result = train_step(run)
        reports.after_step(result)
        checks.after_step(result)
    sink.close()
    record = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])
    tokens = 8 * 16
    assert record["experts"].keys() == {"0", "1"}
    assert all(sum(load["tokens"]) == 2 * tokens for load in record["experts"].values())
    load = record["experts"]["1"]
    assert load["tokens"][0] == tokens and load["max_over_mean"] == 2.0 and load["entropy"] < 0.95
    assert load["dropped"] >= tokens - 8 * 4  # expert 0 takes 16 x 2 / 4 x 0.5 = 4 of each of the 8 sequences
    assert "layer 1: expert" not in capsys.readouterr().out  # half of the choices are still free


def test_the_note_names_layer_and_expert(capsys: pytest.CaptureFixture) -> None:
    run = tiny_run(num_experts=4, disable_bias_linear=True, train_iters=99, moe_router_score_function="sigmoid",
                   moe_router_enable_expert_bias=True)  # fmt: skip
    for stage in run.stages.values():
        stage.decoder.layers["0"].mlp.router.expert_bias.data[:2] = 100.0
    checks = RunChecks(run)
    for _ in range(STARVED_STEPS):
        checks.after_step(train_step(run))
    assert "layer 0: experts 2, 3. They are hardly trained" in capsys.readouterr().out


def test_heat_map(tmp_path: Path) -> None:
    """Loads relative to their mean, per layer; a step without an unmasked token is even."""
    sink = JsonLinesSink(tmp_path / "metrics.jsonl")
    for iteration in range(1, 1001):
        load = {1: [4, 0, 0, 0, 0], 10: [1, 1, 3, 3, 0]} if iteration > 1 else {1: [0] * 5, 10: [0] * 5}
        sink.on_step(step(iteration, expert_load=load))
    sink.close()
    layers, loads = expert_loads(tmp_path / "metrics.jsonl")
    assert layers == [1, 10] and loads.shape == (2, 4, 1000)
    assert loads[:, :, 0].tolist() == [[1.0] * 4] * 2
    assert loads[:, :, 1].tolist() == [[4.0, 0.0, 0.0, 0.0], [0.5, 0.5, 1.5, 1.5]]
    plot_expert_load(tmp_path / "metrics.jsonl", tmp_path / "experts.png")
    assert (tmp_path / "experts.png").stat().st_size > 5000
    JsonLinesSink(tmp_path / "dense.jsonl").on_step(step(1))
    with pytest.raises(DataError, match="no load of experts"):
        expert_loads(tmp_path / "dense.jsonl")
