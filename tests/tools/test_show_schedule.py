"""The tool that draws schedules."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_core.commands.show_schedule import ScheduleFlags, main, with_bare_json
from megatron_core.features.pipeline_schedules.plans import gpipe, zb_h1, zb_v
from megatron_core.planner.simulate import Costs, simulate
from megatron_core.reports.trace_files import Recording, TraceWriter
from megatron_core.schedules import SCHEDULES
from tests.schedules.plans import format_plan

ROOT = Path(__file__).parents[2]


def figures(capsys: pytest.CaptureFixture[str], *flags: str) -> list[dict]:
    """The output of --json."""
    assert main([*flags, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    return found if isinstance(found, list) else [found]


def test_figures_of_a_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = figures(capsys, "--schedule", "zb_h1", "--pipeline-size", "4", "--microbatches", "8")
    assert found["bubble"] == pytest.approx(1 / 9) and found["makespan"] == 27
    assert found["peak_activations"] == [4, 4, 4, 4]
    assert (found["chunks"], found["receive_lookahead"], found["costs"]) == (1, 1, "1,1,1,0")


def test_costs(capsys: pytest.CaptureFixture[str]) -> None:
    """Qi et al. 2023, tables 5 and 6: 1.5B, 8 stages, 24 micro-batches."""
    flags = ["--pipeline-size", "8", "--microbatches", "24", "--costs", "18.522,18.086,9.337,0.601"]
    found = figures(capsys, "--compare", "1f1b,zb_h1,zb_h2", *flags)
    assert [each["bubble"] for each in found] == pytest.approx([0.2431, 0.1585, 0.1083], abs=1e-4)


def test_chunks(capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = figures(capsys, "--schedule", "interleaved", "--chunks", "4")
    assert found["chunks"] == 4
    found = figures(capsys, "--compare", "interleaved, zb_v, 1f1b")
    assert [each["chunks"] for each in found] == [2, 2, 1]
    found = figures(capsys, "--compare", "interleaved,1f1b", "--chunks", "3")
    assert [each["chunks"] for each in found] == [3, 1]


def test_plan_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.txt"
    path.write_text(format_plan(zb_v(2, 4)))
    (found,) = figures(capsys, "--plan", str(path))
    assert (found["schedule"], found["pipeline_size"], found["microbatches"]) == ("mine.txt", 2, 4)
    both = figures(capsys, "--plan", str(path), "--compare", "zb_v", "--pipeline-size", "2", "--microbatches", "4")
    assert both[0] == {**both[1], "schedule": "zb_v"}


def test_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = {kind: tmp_path / kind / f"schedule.{kind}" for kind in ("png", "trace", "json")}
    flags = [word for kind, path in paths.items() for word in (f"--{kind}", str(path))]
    assert main(["--schedule", "zb_v", *flags]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("zb_v: 4 ranks, 2 chunks, 8 micro-batches\n") and "\x1b" not in printed
    assert all(f"wrote {path}" in printed for path in paths.values())
    assert paths["png"].read_bytes().startswith(b"\x89PNG")
    assert json.loads(paths["json"].read_text())["bubble"] == 0
    assert len(json.loads(paths["trace"].read_text())["traceEvents"]) == 4 + 4 * 2 * 8 * 3


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--schedule", "zbh1"], "'zbh1' is not a schedule; legal: 1f1b"),
        (["--schedule", "zb_v", "--chunks", "3"], "zb_v cannot have 3 chunks on each rank; legal: 2"),
        (["--microbatches", "0"], "micro-batches = 0"),
        (["--costs", "1,2"], "costs='1,2' must be F,I,W,COMM"),
        (["--plan", "none.txt"], "plan none.txt cannot be read"),
        (["--compare", "1f1b,gpipe", "--trace", "x.json"], "can hold only one schedule; remove --compare"),
        (["--measured", "nowhere"], "rank00000.jsonl is not a pipeline trace"),
        (["--measured", "nowhere", "--plan", "x.txt"], "plan='x.txt' excludes measured='nowhere'; remove one"),
    ],
)
def test_mistakes(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(flags) == 1
    assert message in capsys.readouterr().err


@pytest.fixture
def traced(tmp_path: Path) -> Path:
    """A trace of three steps of zb_h1 on two ranks, with 20, 10 and 5 ms for each action."""
    plan = zb_h1(2, 3)
    for rank, actions in enumerate(plan.ranks):
        writer = TraceWriter(tmp_path / "traces", rank, [0, 1], "zb_h1", plan.stage_to_rank)
        for step in (1, 2, 3):
            milliseconds = {1: 20, 2: 10, 3: 5}[step]
            ran = simulate(plan, Costs(*[milliseconds] * 3))
            times = (time / 1e3 for action in actions for time in (ran.start[action], ran.end[action]))
            recording = Recording(iter([0.0, *times]).__next__)
            for action in actions:
                recording.begin(action)
                recording.end(action)
            writer.write(step, recording)
    return tmp_path / "traces"


def test_measured_beside_planned(traced: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both have the same durations of actions, so only waiting can differ: here there is none."""
    planned, measured = figures(capsys, "--measured", str(traced))
    assert planned["schedule"] == "zb_h1, step 2, planned (ms)" and measured["schedule"].endswith("measured (ms)")
    assert planned["bubble"] == pytest.approx(measured["bubble"]) == pytest.approx(1 / 10)
    assert planned["makespan"] == pytest.approx(measured["makespan"]) == pytest.approx(100)
    assert measured["costs"] == "0F 10, 0I 10, 0W 10, 1F 10, 1I 10, 1W 10, COMM 0"
    assert figures(capsys, "--measured", str(traced), "--step", "1")[1]["makespan"] == pytest.approx(200)
    paths = {kind: tmp_path / f"schedule.{kind}" for kind in ("png", "trace")}
    assert main(["--measured", str(traced), "--png", str(paths["png"]), "--trace", str(paths["trace"])]) == 0
    _, first, second = capsys.readouterr().out.split("zb_h1, step 2, ")
    rows = [[line for line in text.splitlines() if line.startswith("rank")] for text in (first, second)]
    assert rows[0] == rows[1][:2] and len(rows[0]) == 2
    shares = "computation 90.0%, waiting for collectives 0.0%, idle 10.0%"
    assert rows[1][2:] == [f"rank 0 {shares}", f"rank 1 {shares}"]
    assert paths["png"].read_bytes().startswith(b"\x89PNG")
    events = json.loads(paths["trace"].read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert list(names.values()) == [f"{which}: pipeline rank {r}" for which in ("planned", "measured") for r in (0, 1)]
    assert len(events) == 4 + 2 * 2 * 9 and {event["pid"] for event in events} == set(names)


def test_a_step_that_was_not_traced(traced: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--measured", str(traced), "--step", "9"]) == 1
    assert "step=9 was not traced; legal: 1, 2, 3" in capsys.readouterr().err


def test_unsound_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.txt"
    path.write_text(format_plan(gpipe(2, 2)).replace("0B1", ""))
    assert main(["--plan", str(path)]) == 1
    assert "0B1 is missing" in capsys.readouterr().err


def test_no_flags_at_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "1f1b" in capsys.readouterr().out


def test_json_without_a_file_is_printed() -> None:
    assert with_bare_json(["--json"]) == ["--json", "-"]
    assert with_bare_json(["--json", "--chunks", "2"]) == ["--json", "-", "--chunks", "2"]
    assert with_bare_json(["--json", "a.json", "--chunks", "2"]) == ["--json", "a.json", "--chunks", "2"]


def test_help_names_every_schedule() -> None:
    assert ScheduleFlags.__dataclass_fields__["schedule"].default in SCHEDULES
    code = "from megatron_core.commands.show_schedule import main; main(['--help'])"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    words = run.stdout.replace(",", " ").replace(". ", " ").split()
    assert run.returncode == 0 and set(SCHEDULES) <= set(words)


def test_it_needs_no_torch() -> None:
    code = "import sys; from megatron_core.commands.show_schedule import main; main(['--json'])"
    code += "; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)
