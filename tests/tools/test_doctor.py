"""The output of the doctor."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_core.cpu_ranks.shared_memory.backend import expected
from megatron_core.features.nvidia_libraries.libraries import LIBRARIES
from megatron_core.ops import native
from megatron_core.verify import installation
from megatron_core.verify.ranks import RankFailure
from tests.ops import libraries

ROOT = Path(__file__).parents[2]


def test_the_doctor_as_users_start_it() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "tools/doctor.py", "--verbose"]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert f"torch {torch.__version__}" in result.stdout
    for backend in ("gloo", *(["shm"] if expected() == "shared memory" else [])):
        assert f"{backend}, 2 ranks: all collectives work" in result.stdout
    assert "Warning" not in result.stderr
    for op in ("rms_norm", "layer_norm"):
        assert f"{op} on cpu" in result.stdout
    for name, library in LIBRARIES.items():
        assert f"--kernel-backend {name}, for {', '.join(library.OPS)} on cuda: " in result.stdout


def test_five_lines_say_what_works(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(installation, "run_ranks", lambda *args, **kwargs: [[], []])
    libraries.use(libraries.cpu, monkeypatch)
    assert installation.examine(with_collectives=True, verbose=False) == 0
    lines = capsys.readouterr().out.splitlines()
    names = ["versions:", "devices:", "kernels:", "collectives:", "recommended:"]
    assert [line.split()[0] for line in lines] == names
    assert (
        torch.__version__ in lines[0] and " of " in lines[2] and "gloo" in lines[3] and "work with 2 ranks" in lines[3]
    )


def test_what_is_absent_is_named_with_the_way_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(native, "FOLDER", tmp_path)
    for cached in (native.library, native.unavailable_reason):
        cached.cache_clear()
    try:
        said = "\n".join([*installation.kernel_lines(), *installation.advice()])
    finally:
        for cached in (native.library, native.unavailable_reason):
            cached.cache_clear()
    assert "rms_norm on cpu, float32 float64 bfloat16 float16: reference (PyTorch), because" in said
    assert "libmegatron_cpu_default.so was not built; install a C++ compiler" in said
    assert "native operations on the CPU: a C++ compiler (GCC or Clang)" in said


def test_the_backend_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    libraries.use(libraries.cpu, monkeypatch)
    assert installation.selected("rms_norm", "cpu", torch.float32).startswith("native, libmegatron_cpu_")


def test_partly_supported_operations_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        LIBRARIES["apex"], "unavailable_reason", lambda op, *_: "no layer_norm" if op == "layer_norm" else None
    )
    said = [line for line in installation.other_libraries() if "apex" in line]
    assert said == [
        "--kernel-backend apex, for layer_norm on cuda: no layer_norm",
        "--kernel-backend apex, for multi_tensor, rms_norm on cuda: available; multi_tensor only for some arguments, "
        "see docs/kernels.md",
    ]


def test_wrong_and_failed_collectives_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "run_ranks", lambda *args, **kwargs: [["broadcast"], ["all_reduce", "broadcast"]])
    assert installation.collectives("gloo") == (False, "gloo, 2 ranks: wrong results of all_reduce, broadcast")

    def fail(*args: object, **kwargs: object) -> None:
        raise RankFailure("rank 1 failed:\nTraceback (most recent call last):\nrank 1 exited without a result")

    monkeypatch.setattr(installation, "run_ranks", fail)
    good, sentence = installation.collectives("gloo")
    assert (good, sentence) == (False, "gloo, 2 ranks: failed: rank 1 exited without a result")
    assert installation.examine(with_collectives=True, verbose=False) == 1
    assert installation.examine(with_collectives=False, verbose=False) == 0
