"""Ranks that hang, launchers that die and environments that are wrong, with real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_core.errors import LayoutError
from megatron_core.parallel.launch import World, explained
from tests.memory import needs_proc

ROOT = Path(__file__).resolve().parents[2]
TINY = [
    "--num-layers",
    "1",
    "--hidden-size",
    "16",
    "--num-attention-heads",
    "2",
    "--seq-length",
    "8",
    "--vocab-size",
    "32",
    "--mock-data",
]
TINY += ["--global-batch-size", "4", "--eval-iters", "0", "--log-interval", "1", "--train-iters", "100000"]


def _start(*flags: str) -> subprocess.Popen[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.Popen(
        [*launcher, "pretrain_gpt.py", *TINY, *flags],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_rank_that_hangs_is_reported_with_its_line_and_the_first_collective_that_differs() -> None:
    process = _start("--distributed-timeout-minutes", "0.05", "--inject-fault", "hang@1:3")
    output, _ = process.communicate(timeout=100)
    assert process.returncode != 0
    report = output[output.index("error: ") :]
    assert "rank 1" in report.splitlines()[0] and "has not come within 3 s" in report.splitlines()[0]
    assert "rank 1: in iteration 3 at megatron_core/training/faults.py" in report
    assert "time.sleep" in report
    assert "by rank 0, and not by rank 1" in report
    assert "exitcode  : 75" in report


@needs_proc
def test_when_the_launcher_dies_the_ranks_save_and_end(tmp_path: Path) -> None:
    process = _start("--save", str(tmp_path))
    for line in process.stdout:
        if "iteration        3/" in line:
            break
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.send_signal(signal.SIGKILL)
    output = process.stdout.read()  # until the ranks, which write there, too, have ended
    process.wait()
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in children) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert len(children) >= 2 and not any(Path(f"/proc/{pid}").exists() for pid in children)
    assert f"saved in {tmp_path}" in output
    assert (tmp_path / "latest_checkpointed_iteration.txt").is_file()


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"WORLD_SIZE": "2"}, "RANK is not set"),
        ({"WORLD_SIZE": "x", "RANK": "0"}, "WORLD_SIZE='x'"),
        ({"WORLD_SIZE": "0", "RANK": "0"}, "from 1 on"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "RANK=2 is not below"),
        ({"WORLD_SIZE": "2", "RANK": "-1"}, "RANK='-1'"),
        ({"LOCAL_RANK": "9" * 500}, "LOCAL_RANK="),
    ],
)
def test_a_wrong_environment_is_one_sentence(
    environment: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LayoutError, match=words) as error:
        World.from_environment()
    assert "torchrun" in str(error.value) and len(str(error.value)) < 500


def test_out_of_memory_is_one_sentence_with_ways_out() -> None:
    error = RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 4000000000000 bytes.")
    status, message = explained(error) or (0, "")
    assert status == 1 and "allocating 4000000000000 bytes" in message and "--micro-batch-size" in message
    assert explained(RuntimeError("a bug of ours")) is None


def test_places_that_cannot_be_written_are_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    flags = ["--train-iters", "1", "--metrics-file", str(tmp_path / "file/metrics.jsonl")]
    done = subprocess.run(
        [sys.executable, "pretrain_gpt.py", *TINY, *flags], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr and done.stderr.count("error: ") == 1
    assert str(tmp_path / "file") in done.stderr
    assert explained(OSError(28, "No space left on device")) == (
        1,
        "a file or the standard output cannot be used: No space left on device; give another place, or make room there",
    )
