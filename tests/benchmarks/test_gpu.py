"""The check of a GPU (``make gpu``): each stage on the CPU or a simulated GPU, and stages that go wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import __main__ as program
from benchmarks.gpu import environment, speed, training
from benchmarks.gpu import stages as stages_of_gpus
from benchmarks.gpu.__main__ import Record, check, kept_stages, main, run_all, run_stage
from benchmarks.gpu.report import checked, render, summary
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
    child = f"import time; time.sleep(4.5); open({str(left)!r}, 'w')"
    hang = f"import subprocess, sys, time; print('still here', flush=True); subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(60)"  # noqa: E501
    stages = [
        python("raises", "raise ValueError('the 7th number')"),
        python("hangs", hang, limit=3.0),
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
    assert found["hangs"]["reason"] == "did not end within 3 s and was killed, in <string>:1 in <module>"
    assert "still here" in found["hangs"]["output"]
    assert found["killed"]["reason"] == "ended by SIGKILL"
    assert found["writes nothing"]["reason"] == "wrote no figures"
    assert "cannot be started" in found["absent"]["reason"]
    assert found["impossible"]["reason"] == "the device does not exist"
    assert found["good"]["figures"] == {"speed": 1.5}
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("1 ok, 1 skipped, 5 failed (raises, hangs, killed, writes nothing, absent; output in ")
    html = (tmp_path / "gpu.html").read_text()
    assert (
        "the 7th number" in (tmp_path / "gpu.json").read_text()
        and "| hangs | failed |" in (tmp_path / "gpu.md").read_text()
    )
    assert "the 7th number" in html and "the device does not exist" in html
    time.sleep(max(0.0, began + 8.0 - time.monotonic()))
    assert not left.exists(), "the child of the stage that hung was killed, too"


STACKS = """Fatal Python error: Aborted

Thread 0x1 (most recent call first):
  File "/usr/lib/threading.py", line 1 in wait

Current thread 0x2 (most recent call first):
  File "/usr/lib/subprocess.py", line 5 in wait
  File "{root}/benchmarks/gpu/layouts.py", line 7 in start
Fatal Python error: Aborted

Current thread 0x3 (most recent call first):
  File "{root}/.venv/lib/torch/_inductor/compile.py", line 9 in compile_fx
  File "{root}/megatron_core/transformer/block.py", line 8 in forward
  File "{root}/benchmarks/gpu/speed.py", line 7 in main

Extension modules: numpy (total: 1)
"""


def test_the_line_of_a_stage_at_its_limit() -> None:
    assert program.culprit_of(STACKS.format(root=ROOT)) == (
        "in .venv/lib/torch/_inductor/compile.py:9 in compile_fx, "
        "called at megatron_core/transformer/block.py:8 in forward"
    )
    assert program.culprit_of("Segmentation fault") == ""


def test_a_machine_without_a_gpu_is_refused_in_a_sentence(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert main(["--out", str(tmp_path / "gpu.json")]) == 1
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith("make gpu needs an NVIDIA GPU and torch with CUDA, and torch ") and "sees none" in line
    assert not list(tmp_path.iterdir())


def test_two_speeds_come_first() -> None:
    """A run that ends after some minutes has numbers; everything that the two need is before them."""
    for device in ("cuda", "cpu"):
        names = [stage.name for stage in all_stages(device) if stage.name != "packages"]
        assert names[:4] == ["environment", "build", "speed gpt 1b", "speed llama 8b, 8 layers"]
        assert len(set(names)) == len(names)


def test_figures_of_the_steps_so_far_are_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    step, out = speed.train_step, tmp_path / "figures.json"

    def spied(run: Any) -> object:
        if out.exists():
            seen.append(json.loads(out.read_text()))
        return step(run)

    monkeypatch.setattr(speed, "train_step", spied)
    figures = speed.measure("gpt 1b", "cpu", out)
    assert [each["steps"] for each in seen] == list(range(1, speed.STEPS))
    assert seen[0]["tokens_per_second"] > 0 and figures["product_tflops"] > 0


def test_memory_is_compared_before_a_model_is_made() -> None:
    size = speed.MODELS["gpt 1b"]["micro_batch_size"]
    assert speed.predicted_size("gpt 1b", "cuda", 141e9) == (size, [])
    assert speed.predicted_size("llama 8b, 8 layers", "cuda", 141e9)[1] == []
    smaller, refused = speed.predicted_size("gpt 1b", "cuda", 24e9)
    assert refused and smaller == refused[-1] // 2
    assert speed.predicted_size("gpt 1b", "cuda", 1.0)[0] == 1


def test_the_budget_leaves_out_later_stages(tmp_path: Path) -> None:
    sleeps = [python(name, "import time; time.sleep(30)") for name in ("first", "second")]
    record = Record(tmp_path / "gpu.json", "cpu", 1.0)
    run_all(sleeps, record, 1.0)
    record.write(finished=True)
    first, second = read(tmp_path / "gpu.json")["stages"]
    assert first["status"] == second["status"] == "skipped" and first["seconds"] < 10.0
    assert "larger --minutes" in first["reason"] and "larger --minutes" in second["reason"]


def test_small_stages_run_together(tmp_path: Path) -> None:
    """Each waits for the file of the other."""
    code = "import pathlib, sys, time; here = pathlib.Path({folder!r}); (here / {own!r}).touch()\n"
    code += "while not (here / {other!r}).exists(): time.sleep(0.05)"
    pair = [
        python(own, code.format(folder=str(tmp_path), own=own, other=other), 20.0, is_small=True)
        for own, other in (("a", "b"), ("b", "a"))
    ]
    assert check([*pair, python("last", "")], tmp_path / "gpu.json", "cuda", 60.0, together=2) == 0
    assert [stage["name"] for stage in read(tmp_path / "gpu.json")["stages"]][2] == "last"


def test_an_interrupt_ends_the_stages_that_run(tmp_path: Path) -> None:
    sleeps = [python(name, "import time; time.sleep(30)", is_small=True) for name in ("a", "b")]
    fails = python("c", "", is_small=True)

    class Interrupted(Record):
        def write(self, *, finished: bool = False) -> None:
            raise KeyboardInterrupt

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_all([*sleeps, fails], Interrupted(tmp_path / "gpu.json", "cuda", 60.0), 60.0, together=3)
    assert time.monotonic() - began < 15.0


def test_a_run_continues_another_one(tmp_path: Path) -> None:
    out, ran = tmp_path / "gpu.json", tmp_path / "ran"
    code = f"open({str(ran)!r}, 'a').write('%s '); assert '%s' != 'wrong'"
    names = ("build", "good", "wrong", "later")
    all_of_them = [python(name, code % (name, name), is_repeated=name == "build") for name in names]
    assert check(all_of_them[:3], out, "cuda", 60.0) == 1
    record = json.loads(out.read_text())
    late = [outcome_of_skipped(all_of_them[3])]
    out.write_text(json.dumps(record | {"stages": record["stages"] + late}))
    assert kept_stages(out, all_of_them, "cpu") == kept_stages(tmp_path / "none.json", all_of_them, "cuda") == []
    kept = kept_stages(out, all_of_them, "cuda")
    assert check(all_of_them, out, "cuda", 60.0, kept=kept) == 1
    assert ran.read_text().split() == ["build", "good", "wrong", "build", "later"]
    found = {stage["name"]: stage["status"] for stage in read(out)["stages"]}
    assert found == {"good": "ok", "wrong": "failed", "build": "ok", "later": "ok"}


def test_a_part_that_continues_keeps_the_other_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stages = [python(name, "") for name in ("train a", "train b", "speed a")]
    monkeypatch.setattr(program, "all_stages", lambda device: stages)
    for part in (["speed"], ["train", "--continue"]):
        assert main(["--device", "cpu", "--out", str(tmp_path / "gpu.json"), "--only", *part]) == 0
    assert [stage["name"] for stage in read(tmp_path / "gpu.json")["stages"]] == ["speed a", "train a", "train b"]


def outcome_of_skipped(stage: Stage) -> dict[str, Any]:
    return program.outcome(stage, "skipped", reason="no time")


def test_wheels_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheels, packages = tmp_path / "wheels", tmp_path / "packages"
    assert "packages" not in [stage.name for stage in all_stages("cuda")] or stages_of_gpus.WHEELS.exists()
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "onlyhere-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("onlyhere.py", "number = 7\n")
        wheel.writestr("onlyhere-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: onlyhere\nVersion: 1.0\n")
        wheel.writestr("onlyhere-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("onlyhere-1.0.dist-info/RECORD", "")
    monkeypatch.setattr(stages_of_gpus, "WHEELS", wheels)
    for module in (stages_of_gpus, program):
        monkeypatch.setattr(module, "PACKAGES", packages)
    first = all_stages("cuda")[0]
    uses = python("uses", "import onlyhere; assert onlyhere.number == 7")
    assert check([first, uses], tmp_path / "gpu.json", "cuda", 120.0) == 0, read(tmp_path / "gpu.json")


def test_missing_packages_are_named_with_the_way_to_bring_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "REQUIRED", {"torch": "torch", "no_such_module": "no-such-package"})
    monkeypatch.setattr(sys, "argv", ["environment", "--device", "cpu", "--out", str(tmp_path / "figures.json")])
    assert environment.main() == 1
    [missing] = json.loads((tmp_path / "figures.json").read_text())["missing"]
    assert (
        missing.startswith("no-such-package not installed; pip install -e .") and "-d wheels no-such-package" in missing
    )


def test_without_a_gpu_the_rest_is_left_out(tmp_path: Path) -> None:
    stages = all_stages("cuda")
    assert [stage.name for stage in stages if stage.name != "packages"][:2] == ["environment", "build"]
    assert all((ROOT / path).exists() for path in stages_of_gpus.TESTED.values())
    assert all(stage.limit <= 600 for stage in stages)
    assert {f"train {mode}" for mode in MODES} | {f"speed {shape}" for shape in SHAPES} < {s.name for s in stages}
    assert set(training.PLAIN) < set(MODES) and set(speed.MODELS) == set(SHAPES)
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert check(stages, tmp_path / "gpu.json", "cuda", 300.0) == 1
    record = read(tmp_path / "gpu.json")
    assert [stage["status"] for stage in record["stages"]] == ["failed", *["skipped"] * (len(stages) - 1)]
    assert "torch" in record["stages"][0]["reason"]
    assert record["stages"][0]["figures"]["torch"] == torch.__version__
    assert record["stages"][0]["figures"]["numpy"]


def test_only_names_stages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list", "--only", "speed gpt", "train muon"]) == 0
    assert capsys.readouterr().out.split("\n")[:-1] == [
        *("speed gpt 1b", "train muon", "speed gpt 1b fp8", "speed gpt 1b compiled", "speed gpt 1b, cuda graphs"),
        "speed gpt 1b, window, bounded scores",
    ]
    with pytest.raises(SystemExit):
        main(["--only", "sped"])
    assert "names no stage" in capsys.readouterr().err


@pytest.mark.drawn(2)
@pytest.mark.parametrize("name", [stage.name for stage in all_stages("cpu") if stage.obstacle is None])
def test_each_stage_as_it_is_started(name: str, tmp_path: Path) -> None:
    [stage] = [stage for stage in all_stages("cpu") if stage.name == name]
    found = run_stage(stage, tmp_path, 300.0)
    assert found["status"] == "ok", found["output"]
    record = {"version": 1, "device": "cpu", "started": "now", "finished": True, "seconds": 1.0}
    assert name in render(checked(record | {"budget_seconds": 1.0, "stages": [found]}))


def test_a_page_of_markdown_with_all_numbers(tmp_path: Path) -> None:
    """Every kind of stage as it writes its figures, and one that failed."""
    step = {"transfers_ms": 2.0, "hidden": 0.75, "step_seconds": 0.01}
    figures: dict[str, dict[str, Any]] = {
        "environment": {"gpu": "NVIDIA H200", "torch": "2.13.0", "revision": "abc"},
        "speed gpt 1b": {"tokens_per_second": 51234.5, "mfu": 0.41, "of_products": 0.52, "product_tflops": 788.0},
        "trace launches": {
            "counted": "launches", "launches_per_layer": 61.5, "launches_besides_layers": 40.0,
            "host_waits_per_step": 1.0, "host_waits": {"cudaStreamSynchronize": 1.0},
        },
        "trace gradient reduction": {"off": step | {"hidden": 0.0}, "on": step, "hidden": 0.75},
        "layout tp2 sp": {"transport": "NCCL", "largest_difference": 1e-4, "within": True, "tokens_per_second": 9.0},
        "layout verify": {"transport": "NCCL", "within": True, "layouts": ["tp2 sp: largest error 1.0e-12"]},
        "train bf16": {"largest_difference": 1e-4, "bound": 5e-3, "within": True},
    }  # fmt: skip
    stages = [
        program.outcome(Stage(name, ("python",), 10.0), "ok", 1.0, figures=found) for name, found in figures.items()
    ]
    stages.append(program.outcome(Stage("memcheck", ("x",), 10.0), "failed", 2.0, reason="read | out of bounds"))
    record = {"version": 1, "device": "cuda", "started": "now", "finished": True, "seconds": 9.0}
    record |= {"budget_seconds": 1.0, "stages": stages}
    text = summary(checked(record))
    expected = (
        *("# Check of NVIDIA H200", "7 ok, 1 failed, 0 skipped", "| gpt 1b | 5.123e+04 |", "| 0.41 | 0.52 | 788 |"),
        *("| launches of a layer, forward and backward | 61.5 |", "| of these cudaStreamSynchronize | 1 |"),
        *("| gradient reduction | 2 | 2 | 0 | 0.75 | 10 | 10 |", "| tp2 sp | NCCL | 0.0001 | yes | 9 |  |"),
        *("| verify | NCCL | tp2 sp: largest error 1.0e-12 | yes |", "| bf16 | 0.0001 | 0.005 | yes |"),
        *("| memcheck | failed | 2 | read \\| out of bounds |", "| gpu | NVIDIA H200 |"),
    )
    assert [part for part in expected if part not in text] == [], text
    assert all(word in render(checked(record)) for word in ("Launches and waits", "61.5", "Layouts of two ranks"))


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
