"""Times of a rank: the meter, a run's records, goodput and the lines of timers."""

from __future__ import annotations

import json
import time
from itertools import groupby
from pathlib import Path

import pytest
import torch

from megatron_core.config.validate import problems
from megatron_core.monitor.sinks import JsonLinesSink
from megatron_core.parallel.collectives import all_gather_flat_, all_reduce_, start_gather_sequence
from megatron_core.parallel.grid import Grid
from megatron_core.parallel.groups import ParallelGroups
from megatron_core.reports import measurements
from megatron_core.reports import metrics as rank_records
from megatron_core.reports.goodput import Goodput
from megatron_core.reports.meter import METER, Meter, StepTimes
from megatron_core.reports.metrics import RankWriter, rank_metrics_file, read_run
from megatron_core.reports.reference_rate import share_of_cores
from megatron_core.reports.report import report
from megatron_core.reports.timers import slowest_ranks, timer_lines
from megatron_core.training.loop import train
from megatron_core.verify.ranks import run_ranks
from tests.runs import tiny_config, tiny_run

CPU = torch.device("cpu")


def test_phases_sum_to_the_whole() -> None:
    meter = Meter()
    assert meter.switch("data") == "data", "nothing is charged before the start"
    meter.start(ParallelGroups.single(), CPU)
    with meter.phase("data"):
        time.sleep(0.02)
        with meter.phase("checkpoint", inclusive=True), meter.phase("forward"):
            time.sleep(0.01)
    meter.keep_spans = True
    times = meter.take()
    assert times.phases["data"] >= 0.02 and times.phases["checkpoint"] >= 0.01 and "forward" not in times.phases
    assert sum(times.phases.values()) == pytest.approx(times.seconds, rel=1e-9)
    assert [span.phase for span in meter.spans] == ["other", "data", "checkpoint", "data", "other"]
    assert all(a.end == b.start for a, b in zip(meter.spans, meter.spans[1:], strict=False))


def _collectives() -> StepTimes:
    groups = ParallelGroups(Grid(tp=2, dp=1), torch.distributed.get_rank())
    tp, x = groups.group("tp"), torch.ones(1024)
    METER.start(groups, CPU)
    all_reduce_(x, tp)
    all_gather_flat_(torch.empty(2048), x, tp)
    handle = start_gather_sequence(x.view(64, 16), tp)[1]
    if torch.distributed.get_rank() == 0:
        time.sleep(0.05)
    first = METER.take()
    handle.wait()
    late = METER.take()
    METER.stop()
    assert "tp all_gather" in late.traffic and first.traffic["tp all_gather"].calls == 1
    first.add(late)
    return first


def test_collectives_are_counted_by_group() -> None:
    """Bytes of a ring: 2 (n-1)/n of the data for an all-reduce, (n-1)/n of the whole for gathering."""
    for rank, times in enumerate(run_ranks(2, _collectives)):
        reduced, gathered = times.traffic["tp all_reduce"], times.traffic["tp all_gather"]
        assert (reduced.calls, reduced.bytes) == (1, 4096.0)
        assert (gathered.calls, gathered.bytes) == (2, 2 * 4096.0)
        assert 0 < reduced.exposed <= reduced.in_flight
        if rank == 0:
            assert gathered.in_flight - gathered.exposed > 0.05, "it travelled while this rank slept"
        exposed = sum(traffic.exposed for traffic in times.traffic.values())
        assert sum(times.phases.values()) + exposed == pytest.approx(times.seconds, rel=1e-9)


def _trained(folder: str, settings: dict) -> list[float]:
    run = tiny_run(**settings, save=folder)
    sinks = [JsonLinesSink(Path(folder) / "metrics.jsonl")] if run.world.rank == 0 else []
    train(run, sinks)
    return [float(p.sum()) for stage in run.stages.values() for p in stage.parameters()]


def test_every_rank_records_its_steps(tmp_path: Path) -> None:
    """A pipeline of two stages; recording does not change training."""
    settings = {"pipeline_model_parallel_size": 2, "train_iters": 4, "eval_iters": 1, "log_interval": 2}
    weights = run_ranks(2, _trained, str(tmp_path / "a"), settings | {"log_straggler": True, "timing_log_level": 2})
    assert weights == run_ranks(2, _trained, str(tmp_path / "b"), settings | {"record_times": False})
    found = read_run(tmp_path / "a")
    assert found.notes == [] and sorted(found.ranks) == [0, 1] and len(found.steps()) == 4
    for rank, lines in found.ranks.items():
        header, *stretches = lines
        assert header["coordinates"]["pp"] == rank and header["product_rate"] > 0
        assert [(line["first"], line["last"]) for line in stretches] == [(1, 1), (2, 2), (3, 3), (4, 4), (5, 4)]
        for line in stretches:
            exposed = sum(traffic["exposed"] for traffic in line["traffic"].values())
            assert sum(line["phases"].values()) + exposed == pytest.approx(line["seconds"], rel=1e-4)
        step = stretches[1]
        assert step["phases"]["forward"] > 0 and step["phases"]["backward"] > 0 and step["phases"]["pipeline"] > 0
        assert step["traffic"]["pp send"]["bytes"] == 4 * 16 * 2 * 32 * 4, "4 micro-batches [s, b, h] in float32"
        assert step["memory"]["weights"] > 0 and step["memory"]["current"] > step["memory"]["optimizer"] > 0
        assert stretches[-1]["phases"]["checkpoint"] > 0 and stretches[-1]["phases"]["evaluation"] > 0
    assert "config" in found.header(0) and "config" not in found.header(1)
    event = found.steps()[-1]
    assert event["utilisation"] > 0 and 0 < event["goodput"] <= 1 and event["phases"]["forward"] > 0
    without = read_run(tmp_path / "b")
    assert without.ranks == {} and "no rank recorded" in without.notes[0]


def test_a_restart_keeps_the_rate_that_utilisation_is_against(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The stored rate is used on a machine that is busy at a start; another precision has another rate."""
    rates = iter([1e9, 4e9, 8e9])
    monkeypatch.setattr(measurements, "measure_product_rate", lambda device, dtype: next(rates))
    settings = {"eval_iters": 0, "save_interval": 1, "load": str(tmp_path)}
    _trained(str(tmp_path), settings | {"train_iters": 1})
    _trained(str(tmp_path), settings | {"train_iters": 2})
    assert capsys.readouterr().out.count("utilisation is against 0.001 TFLOP/s of a rank in float32") == 2
    _trained(str(tmp_path), settings | {"train_iters": 3, "bf16": True})
    _trained(str(tmp_path), settings | {"train_iters": 4, "peak_tflops": 0.5})
    _trained(str(tmp_path), settings | {"train_iters": 5})
    found = read_run(tmp_path)
    assert [step["product_rate"] for step in found.steps()] == [1e9, 1e9, 4e9, 5e11, 1e9]
    for step in found.steps():
        assert step["utilisation"] == step["model_flops_per_second"] / step["product_rate"]
    page = report(tmp_path)
    assert "Utilisation is against 0.001 TFLOP/s of a rank in float32" in page
    assert "measured at the start from iteration 0." in page
    assert "From iteration 3 on, utilisation is against 0.004 TFLOP/s of a rank in bfloat16" in page
    assert "From iteration 4 on, utilisation is against 0.5 TFLOP/s" in page and "given by --peak-tflops" in page


def _records(folder: Path, ranks: int) -> Path:
    metrics = folder / "metrics.jsonl"
    for rank in range(ranks):
        writer = RankWriter(metrics, rank, {"world_size": 2, "began": 0.0, "iteration": 0})
        writer.write(1, 1, 1.0, StepTimes({"forward": 0.5}, {}, 0.5), {}, 0)
        writer.close()
    return metrics


def test_records_are_read_as_far_as_they_go(tmp_path: Path) -> None:
    metrics = _records(tmp_path, 1)
    path = rank_metrics_file(metrics, 0)
    path.write_text(path.read_text() + '{"kind": "times", "first": 2, "la')
    found = read_run(tmp_path)
    assert len(found.ranks[0]) == 2
    notes = "\n".join(found.notes)
    assert "metrics.jsonl is missing" in notes and "1 line is damaged or cut off" in notes
    assert "records of 1 of 2 ranks are missing (1)" in notes
    RankWriter(metrics, 0, {"world_size": 1}).close()
    lines = path.read_text().splitlines()
    assert json.loads(lines[-1])["kind"] == "start", "the line cut off before it was ended"


def test_other_versions_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_records, "VERSION", 7)
    _records(tmp_path, 2)
    monkeypatch.undo()
    found = read_run(tmp_path)
    assert found.ranks == {} and any("records of version 7, this program reads 1" in note for note in found.notes)


def _stretch(first: int, last: int, at: float, seconds: float, skipped: int = 0, **phases: float) -> dict:
    return {"kind": "times", "first": first, "last": last, "at": at, "seconds": seconds, "phases": phases,
            "skipped": skipped}  # fmt: skip


def test_goodput_by_hand() -> None:
    """100 s: 10 of start, 40 of steps (4 to save, 8 repeated), 30 stopped, 10 of start, 10 of steps."""
    goodput = Goodput()
    for line in (
        {"kind": "start", "began": 0.0, "iteration": 0},
        _stretch(1, 2, 30.0, 20.0),
        _stretch(3, 4, 50.0, 20.0, checkpoint=4.0),
        {"kind": "start", "began": 80.0, "iteration": 3},
        _stretch(4, 5, 100.0, 10.0, skipped=1),
    ):
        goodput.add(line)
    assert goodput.seconds == 100.0
    assert goodput.lost == {
        "start": 20.0, "restart": 30.0, "repeated": 8.0, "skipped": 5.0, "checkpoint": 4.0, "evaluation": 0.0,
    }  # fmt: skip
    assert goodput.useful == 20.0 + 8.0 + 5.0 and goodput.share == 0.33
    assert goodput.useful + sum(goodput.lost.values()) == goodput.seconds


def test_goodput_of_a_run_that_was_complete_and_goes_on() -> None:
    """The day in between does not count as a restart: 10 s of start, 20 of steps, 5 of start, 10 of steps."""
    goodput = Goodput()
    for line in (
        {"kind": "start", "began": 0.0, "iteration": 0},
        _stretch(1, 2, 30.0, 20.0) | {"complete": True},
        {"kind": "start", "began": 86400.0, "iteration": 2},
        _stretch(3, 3, 86415.0, 10.0),
    ):
        goodput.add(line)
    assert (goodput.seconds, goodput.useful, goodput.lost["start"], goodput.lost["restart"]) == (45.0, 30.0, 15.0, 0.0)


RANKS = [
    {"prefix": "[pp0]", "host": "a", "phases": {"forward": 0.1, "data": 0.5}, "exposed": {"tp all_reduce": 0.02}},
    {"prefix": "[pp1]", "host": "b", "phases": {"forward": 0.3}, "exposed": {"tp all_reduce": 0.01}},
]


def test_timers_as_megatron_prints_them() -> None:
    assert timer_lines(RANKS, 0, "minmax") == []
    one = timer_lines(RANKS, 1, "minmax")
    assert one[0] == "(min, max) time across ranks (ms):" and one[1].endswith(": (100.00, 300.00)")
    assert not any("tp all_reduce" in line for line in one)
    assert timer_lines(RANKS, 2, "max")[-1].endswith(": 20.00")
    assert timer_lines(RANKS, 1, "all")[1:4] == ["  forward:", "     rank  0: 100.00", "     rank  1: 300.00"]
    slow, fast = slowest_ranks(RANKS, 1)
    assert "rank 1 [pp1] on b 300 ms (1.50 of the median)" in slow and "rank 0" in fast


def _profiled(folder: str, settings: dict) -> None:
    _trained(folder, settings | {"profile": True, "profile_step_start": 1, "profile_step_end": 3})


def test_profile_merges_the_traces_of_all_ranks(tmp_path: Path) -> None:
    settings = {"pipeline_model_parallel_size": 2, "train_iters": 4, "eval_iters": 0, "use_pytorch_profiler": True}
    run_ranks(2, _profiled, str(tmp_path), settings)
    events = json.loads((tmp_path / "profile" / "trace.json").read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e.get("name") == "process_name"}
    assert names[0] == "rank 0" and names[1000] == "rank 1" and any("rank 1: " in name for name in names.values())
    for rank in (0, 1):
        own = [event for event in events if event["pid"] == 1000 * rank and event["ph"] == "X"]
        forwards = [event["args"]["action"] for event in own if event["name"] == "forward" and event["args"]]
        actions = [action for action, _ in groupby(forwards)]  # collectives interrupt the time of an action
        assert actions == [f"{rank}F{micro}" for micro in range(4)] * 2, "two steps of four micro-batches"
        assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in own)
        assert any("all_reduce" in event["name"] and event["cat"] == "in flight" for event in own)
        kernels = [e for e in events if e["pid"] // 1000 == rank and e.get("cat") == "cpu_op"]
        assert kernels, "torch.profiler's operations"
        start, end = min(e["ts"] for e in own), max(e["ts"] + e["dur"] for e in own)
        inside = [e for e in kernels if start - 1e5 <= e["ts"] <= end + 1e5]
        assert len(inside) > 0.9 * len(kernels), "both are on one clock"


def test_a_profile_of_some_ranks(tmp_path: Path) -> None:
    settings = {"train_iters": 2, "eval_iters": 0, "profile_ranks": (1,), "optimizer_offload_dir": str(tmp_path)}
    run_ranks(2, _profiled, str(tmp_path), settings)
    events = json.loads((tmp_path / "profile" / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {1000}, "a run that ends before the last step writes what there is"
    in_flight = {event["name"] for event in events if event.get("cat") == "in flight"}
    assert in_flight >= {"disk read", "disk write"}, "transfers of offloading have tracks"


def test_settings_that_leave_nothing_to_trace() -> None:
    wrong = {"profile": True, "profile_step_start": 5, "profile_step_end": 5, "profile_ranks": (2,)}
    first, second = problems(tiny_config(**wrong), 2)
    assert "profile_step_start=5" in first and "profile_ranks=[2]" in second and "0 to 1" in second
    (sentence,) = problems(tiny_config(log_straggler=True, record_times=False), 1)
    assert "cannot be used with --no-record-times" in sentence and not list(problems(tiny_config(profile=True), 1))


def test_ranks_that_share_cores() -> None:
    """The capacity of a host does not depend on the number of its ranks once they use all cores."""
    assert [share_of_cores(ranks, 1, cores=2) for ranks in (1, 2, 4, 8)] == [1.0, 1.0, 0.5, 0.25]
    assert share_of_cores(2, 4, cores=4) == 0.5 and share_of_cores(1, 1) == 1.0
