"""Damaged records of a run give a result or one error sentence, for any damaged field."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from megatron_core.commands import diagnose, plot_metrics, report
from megatron_core.monitor.sinks import JsonLinesSink
from megatron_core.reports.meter import StepTimes, Traffic
from megatron_core.reports.metrics import RankWriter, rank_metrics_file, read_run
from tests.monitor.examples import step, validation

VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 1.5, 10**18, 10**400, 1e308, -1e308, 5e-324, float("nan"), float("inf"), "", "\x1b[31m", "9" * 9,
    [], [1], [[]], {}, {"": None}, {"a": "b"}, ...,
)  # fmt: skip
"""Replacements of a field; ``...`` removes it."""
SETTINGS = {
    "num_layers": 4, "num_experts": 4, "pipeline_model_parallel_size": 2, "tensor_model_parallel_size": 1,
    "context_parallel_size": 1, "expert_model_parallel_size": 1, "micro_batch_size": 2, "global_batch_size": 4,
    "num_virtual_stages_per_pipeline_rank": None, "num_layers_per_virtual_pipeline_stage": 1, "seq_length": 16,
    "trace_pipeline": None, "num_workers": 1, "save_interval": 2, "eval_interval": 2, "bf16": False,
    "moe_aux_loss_coeff": 0.1, "zero_stage": None, "recompute_granularity": "full", "moe_layer_freq": [1, 1],
}  # fmt: skip


def write_run(folder: Path) -> Path:
    """The records of a run of two ranks with experts; returns the metrics file."""
    metrics = folder / "metrics.jsonl"
    sink, parts = JsonLinesSink(metrics), ("embedding", "layer 0", "head")
    loads = {0: (3, 5, 0, 8, 0), 1: (4, 4, 4, 4, 1)}
    norms = {f"{kind}-norm by layer/{part}": 1.25 for kind in ("grad", "params") for part in parts}
    reported = {"phases": {"forward": 0.01}, "memory": {"weights": 1000}, "goodput": 0.9, "product_rate": 1e11}
    for number in range(1, 5):
        sink.on_step(step(number, expert_load=loads, breakdown=norms | {"lm loss by source/web": 2.0}, **reported))
    sink.on_validation(validation(4))
    sink.close()
    config = {"config": SETTINGS, "environment": {"torch": "2.13"}}
    for rank in range(2):
        about = {
            "world_size": 2, "coordinates": {"tp": 0, "dp": 0, "pp": rank}, "host": "node0", "device": "cpu",
            "began": 1.7e9, "iteration": 0, "layout": "pp2", "work": 1e4 * (1 + rank), "memory_total": 2**34,
            "product_rate": 1e11,
        }  # fmt: skip
        writer = RankWriter(metrics, rank, about | (config if rank == 0 else {}))
        for number in range(1, 5):
            phases = {"forward": 0.2, "backward": 0.3 * (1 + rank), "pipeline": 0.3, "data": 0.1, "checkpoint": 0.05}
            traffic = {"dp all_reduce": Traffic(3, 1e6, 0.1, 0.2), "pp send": Traffic(4, 1e5, 0.05, 0.1)}
            times = StepTimes(phases, traffic, sum(phases.values()) + 0.15)
            writer.write(number, number, 1.7e9 + 2 * number, times, {"peak": 2**30, "weights": 1000}, 0)
        writer.close()
    return metrics


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every field of a record."""
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        yield (*path, key)
        if isinstance(item, dict | list):
            yield from places(item, (*path, key))


def damaged(line: str, place: tuple[Any, ...], value: Any) -> str:
    """A line with another value at one position."""
    record = json.loads(line)
    inner = record
    for key in place[:-1]:
        inner = inner[key]
    if value is ...:
        del inner[place[-1]]
    else:
        inner[place[-1]] = value
    return json.dumps(record)


def cases(metrics: Path) -> list[tuple[Path, int, tuple[Any, ...], Any]]:
    """Every field of a record of each kind, at the end of its file and elsewhere, with every value."""
    found = []
    for path, numbers in (
        (metrics, (0, 3, 4)),
        (rank_metrics_file(metrics, 0), (0, 1, 4)),
        (rank_metrics_file(metrics, 1), (0, 4)),
    ):
        lines = path.read_text().splitlines()
        for number in numbers:
            found += [(path, number, place, value) for place in places(json.loads(lines[number])) for value in VALUES]
    return found


def assert_programs_end(metrics: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each program ends with a result or with one sentence."""
    page, curve = str(metrics.parent / "page.html"), str(metrics.parent / "curve.png")
    programs: tuple[Callable[[], int], ...] = (
        lambda: diagnose.main([str(metrics.parent)]),
        lambda: report.main([str(metrics.parent), "--out", page]),
        lambda: plot_metrics.plot((str(metrics),), out=curve),
        lambda: plot_metrics.plot((str(metrics),), out=curve, experts=True),
    )
    for program in programs:
        began = time.monotonic()
        status, printed = program(), capsys.readouterr()
        assert status in (0, 1) and time.monotonic() - began < 20
        assert printed.err.count("\n") == status and "\x1b" not in printed.err


@pytest.fixture
def without_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes most of the time; only one of the tests draws."""
    monkeypatch.setattr(Figure, "savefig", lambda self, file, **settings: None)


@pytest.mark.parametrize("share", [0.008, pytest.param(1.0, marks=pytest.mark.whole_matrix)])
def test_a_damaged_field(
    share: float, tmp_path: Path, capsys: pytest.CaptureFixture[str], without_pictures: None
) -> None:
    metrics = write_run(tmp_path)
    assert_programs_end(metrics, capsys)
    chosen = cases(metrics)
    faults = []
    for path, number, place, value in random.Random(0).sample(chosen, int(share * len(chosen))):
        good = path.read_text()
        lines = good.splitlines()
        lines[number] = damaged(lines[number], place, value)
        path.write_text("\n".join(lines) + "\n")
        try:
            assert_programs_end(metrics, capsys)
        except Exception as error:  # all of them at once
            faults.append(f"{path.name}:{number} {place}={value!r}: {type(error).__name__}: {error}")
        path.write_text(good)
    assert not faults, "\n".join(faults)


def _torn(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def _binary(path: Path) -> None:
    path.write_bytes(b"\xff\xfe\x00" + random.Random(0).randbytes(500) + b"\n" + path.read_bytes())


def _twice(path: Path) -> None:
    path.write_bytes(2 * path.read_bytes())


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _without_metrics(path: Path) -> None:
    for file in path.parent.parent.glob("metrics.jsonl"):
        file.unlink()


def _null(path: Path) -> None:
    path.write_text("null\n[]\n1\n" + "[" * 100_000 + "\n" + "9" * 10_000 + "\n")


DAMAGES = (_torn, _binary, _twice, _folder, _null, Path.unlink, lambda path: path.write_text(""), _without_metrics)


@pytest.mark.parametrize("damage", range(len(DAMAGES)))
@pytest.mark.parametrize("name", ["metrics.jsonl", "metrics.ranks/rank00000.jsonl", "metrics.ranks/rank00001.jsonl"])
def test_a_damaged_file(
    name: str, damage: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], without_pictures: None
) -> None:
    metrics = write_run(tmp_path)
    DAMAGES[damage](tmp_path / name)
    assert_programs_end(metrics, capsys)


def test_left_out_files_and_lines_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = write_run(tmp_path)
    path = rank_metrics_file(metrics, 1)
    for name in ("rankx.jsonl", "rank.jsonl", "rank-0001.jsonl", "\x1b[31m.jsonl"):
        (path.parent / name).write_text("{}\n")
    path.write_text(path.read_text().replace('"seconds": ', '"seconds": null, "was": '))
    notes = read_run(tmp_path).notes
    named = ["\\x1b[31m.jsonl", "rank-0001.jsonl", "rank.jsonl", "rank00001.jsonl:", "rankx.jsonl"]
    assert [note.partition(" ")[0] for note in notes] == named
    assert "rank00001.jsonl: 4 lines are damaged or cut off" in "\n".join(notes)
    assert diagnose.main([str(tmp_path)]) == 0
    assert "note: rankx.jsonl is not named as a rank's file" in capsys.readouterr().out


def test_a_damaged_step_is_named_with_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = write_run(tmp_path)
    metrics.write_text(metrics.read_text().replace('"consumed_tokens": 128', '"consumed_tokens": -128'))
    assert plot_metrics.plot((str(metrics),), out=str(tmp_path / "a.png")) == 1
    assert "line 2 is not a record of a run: missing or out of range: consumed_tokens" in capsys.readouterr().err
