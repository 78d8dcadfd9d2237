"""Metrics of an engine's steps and the diagnosis of their files."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import torch
from torch import nn

import megatron_core
from megatron_core.reports.diagnosis_rules import diagnose
from megatron_core.reports.metrics import read_run
from megatron_core.reports.summary import RunSummary
from megatron_core.verify.ranks import run_ranks
from tests.simulated_gpu import streams
from tests.simulated_gpu.device import LOG
from tests.simulated_gpu.runtime import simulated_gpu


def test_files_of_a_run(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    reports = run_ranks(2, _train, str(path))[0]
    records = read_run(path)
    assert records.notes == []
    assert [(step["loss"], step["grad_norm"], step["learning_rate"]) for step in records.steps()] == reports
    for number, step in enumerate(records.steps(), 1):
        assert (step["iteration"], step["consumed_samples"]) == (number, 8 * number)
        assert abs(step["samples per second"] * step["elapsed_ms"] / 1000.0 - 8.0) < 1e-6
    for lines in records.ranks.values():
        times = [line for line in lines if line["kind"] == "times"]
        assert [line["last"] for line in times] == [1, 2, 3]
        for line in times:
            assert line["phases"].keys() >= {"forward", "backward", "optimizer"}
            # 8 x 8 + 8 numbers of 4 bytes, padded; a ring sends half of them.
            assert 144 <= line["traffic"]["dp reduce_scatter"]["bytes"] < 200
            waited = sum(each["exposed"] for each in line["traffic"].values())
            assert abs(sum(line["phases"].values()) + waited - line["seconds"]) < 1e-4
    assert "of the time" in diagnose(RunSummary.of(records)).text()


def _train(path: str) -> list[tuple[float, float, float]]:
    config = {"global_batch_size": 8, "micro_batch_size": 2, "zero_stage": 1, "metrics_file": path}
    engine = megatron_core.initialize(nn.Linear(8, 8), config).engine
    found = []
    while len(found) < 3:
        engine.backward(engine(torch.randn(2, 8)).square().mean())
        if (report := engine.step()) is not None:
            found.append((report.loss, report.grad_norm, report.learning_rate))
    engine.monitor.close()
    return found


def _events_and_waits(path: str) -> tuple[list[int], list[int]]:
    """Events with times and waits of the host, by step, on a simulated GPU."""
    counts: list[int] = []

    def counted(self, *arguments, real=streams.Event.record) -> None:
        counts[-1] += self.timed
        real(self, *arguments)

    config = {"global_batch_size": 8, "micro_batch_size": 2, "zero_stage": 1, "metrics_file": path}
    waits: list[int] = []
    with simulated_gpu(), patch.object(streams.Event, "record", counted):
        counts.append(0)
        model = nn.Sequential(*(nn.Linear(8, 8, device="cuda") for _ in range(6)))
        engine = megatron_core.initialize(model, config | {"ddp_bucket_size": 72}).engine
        for _ in range(6):
            counts.append(0)
            LOG.stalls.clear()
            report = None
            while report is None:
                engine.backward(engine(torch.ones(2, 8, device="cuda")).square().mean())
                report = engine.step()
            waits.append(sum(LOG.stalls.values()))
        engine.monitor.close()
    return counts[1:], waits


def test_a_gpu_times_collectives_in_sampled_steps_only(tmp_path: Path) -> None:
    """Two events for each collective cost host time; and the events of a step are read at its only wait."""
    events, waits = run_ranks(2, _events_and_waits, str(tmp_path / "metrics.jsonl"))[0]
    assert max(events[3:]) < events[1]
    assert waits[3:] == [1, 1, 1]
