"""The check of a GPU (``make gpu``): each stage on the CPU or a simulated GPU, and stages that go wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import speed, training
from benchmarks.gpu.__main__ import Record, check, main, run_all, run_stage
from benchmarks.gpu.report import checked, render
from benchmarks.gpu.stages import MODES, ROOT, SHAPES, Stage, all_stages
from megatron_core.errors import DataError
from megatron_core.verify.ranks import run_ranks
from tests.simulated_gpu.runtime import simulated_gpu

TINY = training.SHAPE | training.TINY
WRITES = "import json, sys; open(sys.argv[sys.argv.index('--out') + 1], 'w').write(json.dumps({'speed': 1.5}))"


def python(name: str, code: str, limit: float = 60.0, **settings: Any) -> Stage:
    """A stage that runs ``code``."""
    return Stage(name, (sys.executable, "-c", code), limit, **settings)


def read(path: Path) -> dict[str, Any]:
    """The record, checked."""
    return checked(json.loads(path.read_text()))


def test_what_goes_wrong_is_reported_and_the_others_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    left = tmp_path / "left"
    child = f"import time; time.sleep(2.5); open({str(left)!r}, 'w')"
    hang = f"import subprocess, sys, time; print('still here', flush=True); subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(60)"  # noqa: E501
    stages = [
        python("raises", "raise ValueError('the 7th number')"),
        python("hangs", hang, limit=1.5),
        python("killed", "import os; os.kill(os.getpid(), 9)"),
        python("writes nothing", "", has_figures=True),
        Stage("absent", ("/no/such/program",), 10.0),
        python("impossible", "", obstacle="the device does not exist"),
        python("good", WRITES, has_figures=True),
    ]
    began = time.monotonic()
    assert check(stages, tmp_path / "gpu.json", "cpu", 120.0) == 1
    record = read(tmp_path / "gpu.json")
    assert record["finished"]
    found = {stage["name"]: stage for stage in record["stages"]}
    assert [stage["status"] for stage in found.values()] == [*["failed"] * 5, "skipped", "ok"]
    assert "the 7th number" in found["raises"]["output"] and found["raises"]["reason"] == "exit status 1"
    assert found["hangs"]["reason"] == "did not end within 2 s and was killed"
    assert "still here" in found["hangs"]["output"]
    assert found["killed"]["reason"] == "ended by SIGKILL"
    assert found["writes nothing"]["reason"] == "wrote no figures"
    assert "cannot be started" in found["absent"]["reason"]
    assert found["impossible"]["reason"] == "the device does not exist"
    assert found["good"]["figures"] == {"speed": 1.5}
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("1 ok, 1 skipped, 5 failed (raises, hangs, killed, writes nothing, absent; output in ")
    html = (tmp_path / "gpu.html").read_text()
    assert "the 7th number" in html and "the device does not exist" in html
    time.sleep(max(0.0, began + 4.5 - time.monotonic()))
    assert not left.exists(), "the child of the stage that hung was killed, too"


def test_the_budget_leaves_out_later_stages(tmp_path: Path) -> None:
    sleeps = [python(name, "import time; time.sleep(30)") for name in ("first", "second")]
    record = Record(tmp_path / "gpu.json", "cpu", 1.0)
    run_all(sleeps, record, 1.0)
    record.write(finished=True)
    first, second = read(tmp_path / "gpu.json")["stages"]
    assert first["status"] == second["status"] == "skipped" and first["seconds"] < 10.0
    assert "larger --minutes" in first["reason"] and "larger --minutes" in second["reason"]


def test_without_a_gpu_the_rest_is_left_out(tmp_path: Path) -> None:
    stages = all_stages("cuda")
    assert [stage.name for stage in stages][:2] == ["environment", "build"]
    assert {f"train {mode}" for mode in MODES} | {f"speed {shape}" for shape in SHAPES} < {s.name for s in stages}
    assert set(training.PLAIN) < set(MODES) and set(speed.MODELS) == set(SHAPES)
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert check(stages, tmp_path / "gpu.json", "cuda", 300.0) == 1
    record = read(tmp_path / "gpu.json")
    assert [stage["status"] for stage in record["stages"]] == ["failed", *["skipped"] * (len(stages) - 1)]
    assert "torch" in record["stages"][0]["reason"]
    assert record["stages"][0]["figures"]["torch"] == torch.__version__


def test_only_names_stages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list", "--only", "speed gpt", "train muon"]) == 0
    assert capsys.readouterr().out.split("\n")[:-1] == [
        *("train muon", "speed gpt 1b", "speed gpt 1b fp8", "speed gpt 1b compiled", "speed gpt 1b, cuda graphs"),
        "speed gpt 1b, window, bounded scores",
    ]
    with pytest.raises(SystemExit):
        main(["--only", "sped"])
    assert "names no stage" in capsys.readouterr().err


@pytest.mark.drawn(4)
@pytest.mark.parametrize("name", [stage.name for stage in all_stages("cpu") if stage.obstacle is None])
def test_each_stage_as_it_is_started(name: str, tmp_path: Path) -> None:
    [stage] = [stage for stage in all_stages("cpu") if stage.name == name]
    found = run_stage(stage, tmp_path, 300.0)
    assert found["status"] == "ok", found["output"]
    record = {"version": 1, "device": "cpu", "started": "now", "finished": True, "seconds": 1.0}
    assert name in render(checked(record | {"budget_seconds": 1.0, "stages": [found]}))


@pytest.mark.parametrize("changed", [{"status": "well"}, {"seconds": -1.0}, {"reason": 3}, {"status": "failed"}])
def test_a_record_with_wrong_fields_is_refused(changed: dict[str, Any], tmp_path: Path) -> None:
    stage = run_stage(python("good", WRITES, has_figures=True), tmp_path, 60.0)
    record = {"version": 1, "device": "cpu", "started": "now", "finished": True, "seconds": 1.0, "budget_seconds": 1.0}
    checked(record | {"stages": [stage]})
    with pytest.raises(DataError, match="invalid fields: stages"):
        checked(record | {"stages": [stage | changed]})


def modes_on_a_simulated_gpu(names: list[str]) -> list[dict[str, Any]]:
    found = []
    for name in names:
        expected = training.losses_on("cpu", TINY | training.PLAIN[name].both)
        with simulated_gpu():
            losses = training.losses_on("cuda", TINY | training.PLAIN[name].both | training.PLAIN[name].own)
        bound = training.PLAIN[name].bound * training.TINY_BOUND
        found.append(training.compared(losses, expected, bound))
    return found


SIMULATED = [
    name for name in training.PLAIN if name not in ("fp8 delayed", "fp8 tensorwise", "fp8 rowwise", "compiled")
]


@pytest.mark.drawn(3)
@pytest.mark.parametrize("name", SIMULATED)
def test_modes_on_a_simulated_gpu(name: str) -> None:
    [[figures]] = run_ranks(1, modes_on_a_simulated_gpu, [name])
    assert figures["within"], figures


def resumed_and_generated() -> list[dict[str, Any]]:
    expected = training.generated("cpu", TINY)
    with simulated_gpu():
        text = training.generated("cuda", TINY)
        return [training.resumed("cuda", TINY), {"within": text == expected, "found": text}]


def test_checkpoint_and_generation_on_a_simulated_gpu() -> None:
    [found] = run_ranks(1, resumed_and_generated)
    assert all(figures["within"] for figures in found), found


def test_losses_that_differ_do_not_pass() -> None:
    expected = training.losses_on("cpu", TINY)
    other = training.losses_on("cpu", TINY | {"lr": 1.7e-3})
    assert training.compared(expected, expected, 0.0)["within"]
    assert not training.compared(other, expected, training.PLAIN["bf16"].bound * training.TINY_BOUND)["within"]
    assert not training.compared(expected[:-1], expected, 1.0)["within"]
    assert not training.compared([float("nan"), *expected[1:]], expected, 1.0)["within"]
    assert not training.compared([6.0, 6.0], [6.0, 6.0], 1.0)["within"], "nothing was learned"


def test_a_smaller_micro_batch_where_memory_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    step = speed.train_step

    def small(run: Any) -> object:
        if run.config.training.micro_batch_size > 1:
            raise torch.OutOfMemoryError("out of memory")
        return step(run)

    monkeypatch.setattr(speed, "train_step", small)
    figures = speed.measure("gpt 1b", "cpu")
    assert figures["out_of_memory"] == [2] and figures["micro_batch_size"] == 1
    assert figures["tokens_per_second"] > 0.0 and figures["mfu"] is None and figures["of_products"] > 0.0


def test_machines_by_the_names_of_their_gpus() -> None:
    names = {"NVIDIA H100 80GB HBM3": "h100", "NVIDIA A100-SXM4-80GB": "a100", "NVIDIA H200": "h200", "Tesla T4": None}
    assert {name: speed.machine_of(name) for name in names} == names
    assert set(speed.SHEET) <= set(speed.known_hardware())


def test_make_gpu_starts_it_without_a_network(tmp_path: Path) -> None:
    command = ["make", "gpu", f"PYTHON={sys.executable}", f"VENV={tmp_path}", "GPU_FLAGS=--list --device cpu"]
    result = subprocess.run(command, cwd=ROOT, env={**os.environ}, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "train bf16" in result.stdout and "speed gpt 1b" in result.stdout
