"""Transfers in --profile and --trace-pipeline: each call of torch.distributed and each copy has its interval."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from benchmarks.offloading import on_a_device
from megatron_core.commands.show_schedule import main
from megatron_core.features.offload.transfer import Lane
from megatron_core.parallel import collectives
from megatron_core.reports.trace_files import read_trace
from megatron_core.training import loop
from megatron_core.verify.ranks import run_ranks
from tests.defects.plant import planted
from tests.parity.moe_rows import EP2, MIXTRAL
from tests.runs import tiny_run

STEPS, DELAY = 2, 0.004
EXPERTS = MIXTRAL | EP2 | {"zero_stage": 3}
HOST = {"cpu_offloading": True, "cpu_offloading_num_layers": 2, "optimizer_cpu_offload": True, "bf16": True}
POWERSGD = {"grad_compression": "powersgd", "powersgd_rank": 1, "grad_compression_warmup_iters": 0}
ONEBIT = {"grad_compression": "onebit-adam", "grad_compression_warmup_iters": 1}
BF16 = {"grad_compression": "bf16", "zero_stage": 2}
Counts = Counter[str]


def calls_of(folder: str, settings: dict[str, Any], at_host: bool) -> Counts:
    """Train with both traces; count the calls of the steps where they leave the project.

    Each wait for an all-to-all takes at least ``DELAY``.
    """
    found, inside = Counts(), [False]

    def counted(owner: Any, name: str, kind: str | Callable[[Lane], str]) -> None:
        call = getattr(owner, name)

        def counting(*args: Any, **options: Any) -> Any:
            found[kind if isinstance(kind, str) else kind(args[0])] += inside[0]
            return call(*args, **options)

        patch.setattr(owner, name, counting)

    def step(*args: Any, **options: Any) -> Any:
        inside[0] = True
        result = train_step(*args, **options)
        inside[0] = False
        return result

    def slowly(handle: collectives.All) -> None:
        time.sleep(DELAY)
        wait(handle)

    train_step, wait = loop.train_step, collectives.All.wait
    more = {"train_iters": STEPS, "eval_iters": 0, "global_batch_size": 4, "save": folder, "profile": True}
    more |= {"profile_step_start": 0, "profile_step_end": STEPS, "trace_pipeline": f"{folder}/trace"}
    with on_a_device() if at_host else nullcontext(), pytest.MonkeyPatch.context() as patch:
        counted(dist, "all_reduce", "all_reduce")
        counted(dist, "all_to_all_single", "all_to_all")
        counted(collectives, "_all_gather", "all_gather")
        counted(collectives, "_reduce_scatter", "reduce_scatter")
        counted(Lane, "_started", lambda lane: lane._name.split()[1])
        patch.setattr(collectives.All, "wait", slowly)
        patch.setattr(loop, "train_step", step)
        loop.train(tiny_run(**settings | more), [])
    return found


def traced(folder: Path, settings: dict[str, Any], *, at_host: bool = False) -> list[tuple[Counts, list, list]]:
    """For each rank the calls by kind, and the intervals of the profile and of the pipeline's trace.

    Intervals are (name, duration, waited), in seconds.
    """
    every = run_ranks(2, calls_of, str(folder), settings, at_host)
    events = json.loads((folder / "profile" / "trace.json").read_text())["traceEvents"]
    result = []
    for rank, calls in enumerate(every):
        own = [each for each in events if each["pid"] == 1000 * rank and each.get("cat") == "in flight"]
        profile = [(each["name"], each["dur"] / 1e6, each["args"]["waited_us"] / 1e6) for each in own]
        timelines = read_trace(folder / "trace", rank).timelines
        assert list(timelines) == [*range(1, STEPS + 1)]
        flights = [each for timeline in timelines.values() for each in timeline.transfers[0]]
        trace = [(each.name, (each.end - each.start) / 1e3, each.waited / 1e3) for each in flights]
        result.append((calls, profile, trace))
    return result


def kind_of(name: str) -> str:
    return name.partition(":")[0].split()[1]


def check(found: list[tuple[Counts, list, list]], names: set[str]) -> None:
    """``names`` are in both traces of each rank, and the number of intervals of each kind is that of its calls."""
    for calls, profile, trace in found:
        for intervals in (profile, trace):
            assert names <= {name for name, *_ in intervals}
            counts = Counts(kind_of(name) for name, *_ in intervals)
            for kind in map(kind_of, names):
                # Transfers for the next step are still in flight at the end; a few sums precede the pipeline or follow.
                extra = 4 if kind in ("all_reduce", "all_gather") else 0
                assert calls[kind] - calls[kind] // STEPS <= counts[kind] <= calls[kind] + extra, (kind, counts, calls)
            assert all(-1e-5 <= waited <= time + 1e-5 for _, time, waited in intervals)
            waits = [waited for name, _, waited in intervals if kind_of(name) == "all_to_all"]
            assert all(waited >= DELAY for waited in waits), "the time in which the rank only waits"


@pytest.mark.parametrize(
    ("settings", "names", "at_host"),
    [
        (EXPERTS | {"optimizer_offload_dir": ""}, {"dp all_to_all", "dp all_gather", "disk read", "disk write"}, False),
        (POWERSGD, {"dp all_reduce: compressed gradients"}, False),
        (ONEBIT, {f"dp {kind}: compressed gradients" for kind in ("all_to_all", "all_gather")}, False),
        (BF16, {"dp reduce_scatter: compressed gradients"}, False),
        (HOST, {"host copy_out", "host copy_in"}, True),
    ],
    ids=["experts, zero 3, disk", "powersgd", "onebit", "bf16", "host"],
)  # fmt: skip
def test_both_traces_show_every_transfer(
    settings: dict[str, Any], names: set[str], at_host: bool, tmp_path: Path
) -> None:
    folders = {name: str(tmp_path / name) for name in settings if name.endswith("dir")}
    check(traced(tmp_path, settings | folders, at_host=at_host), names)


def test_show_schedule_marks_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = MIXTRAL | EP2 | {"pipeline_model_parallel_size": 1}
    traced(tmp_path, settings)
    files = {name: str(tmp_path / f"out.{name}") for name in ("json", "trace", "png")}
    flags = [word for name, path in files.items() for word in (f"--{name}", path)]
    assert main(["--measured", str(tmp_path / "trace"), "--rank", "1", *flags]) == 0
    planned, measured = capsys.readouterr().out.split("measured (ms)")
    assert "in flight" not in planned and "= transfer in flight" in measured and "rank 0 dp all_to_all: " in measured
    row = next(line for line in measured.splitlines() if set(line) == {" ", "="})
    assert 0 < row.count("=") <= len(row)
    events = json.loads(Path(files["trace"]).read_text())["traceEvents"]
    shown = [each for each in events if each.get("cat") == "in flight"]
    (_, totals) = json.loads(Path(files["json"]).read_text())
    (traffic,) = totals["traffic"]
    assert Counts(each["name"] for each in shown) == {name: total["number"] for name, total in traffic.items()}
    tracks = {each["tid"] for each in shown}
    assert tracks <= {each["tid"] for each in events if each["ph"] == "M"} and 0 not in tracks


@pytest.mark.parametrize(
    ("place", "old", "new", "settings", "names"),
    [
        ("data_parallel.buffer:Bucket.continue_reduce", "METER.labelled(COMPRESSED)", "METER.labelled(None)", POWERSGD,
         {"dp all_reduce: compressed gradients"}),
        ("reports.meter:Meter.flights_since", "flight.end > moments[mark]", "flight.end > moments[mark] + 1e3",
         EXPERTS, {"dp all_to_all"}),
        ("reports.meter:ChargedWait.wait", "self._transfer.waits.append", "id", EXPERTS, {"dp all_to_all"}),
        ("features.offload.transfer:Lane.start",
         "METER.run(operation, where, size, lambda: self._started(call, for_host=for_host))",
         "self._started(call, for_host=for_host)", {"optimizer_offload_dir": ""}, {"disk read"}),
    ],
    ids=["label", "trace", "waiting", "disk"],
)  # fmt: skip
def test_finds_transfers_that_are_missing(
    place: str, old: str, new: str, settings: dict[str, Any], names: set[str], tmp_path: Path
) -> None:
    folders = {name: str(tmp_path / name) for name in settings if name.endswith("dir")}
    with planted(place, old, new), pytest.raises(AssertionError):
        check(traced(tmp_path, settings | folders), names)
