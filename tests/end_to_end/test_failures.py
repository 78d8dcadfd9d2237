"""Ranks that hang, launchers that die and invalid environments, with real processes."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # creating an optimizer loads it, in 1.5 s; loaded here, every forked rank has it

from megatron_core.errors import LayoutError
from megatron_core.parallel.exit_status import exit_explanation
from megatron_core.parallel.launch import run_job, start_world
from megatron_core.parallel.world import World
from megatron_core.training.pretrain import pretrain
from tests.memory import needs_proc
from tests.programs import ForkedPopen, free_port, run_program
from tests.runs import tiny_config

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


def _start(*flags: str) -> ForkedPopen:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return ForkedPopen(
        [*launcher, "pretrain_gpt.py", *TINY, *flags],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_rank_that_hangs_is_reported_with_its_line_and_the_first_collective_that_differs() -> None:
    process = _start("--distributed-timeout-minutes", "0.1", "--inject-fault", "hang@1:3")
    output, _ = process.communicate(timeout=300)
    assert process.returncode != 0
    report = output[output.index("error: ") :]
    assert "rank 1" in report.splitlines()[0] and "did not join within 6 s" in report.splitlines()[0]
    assert "rank 1 [pp0 dp1 tp0]: in iteration 3 at megatron_core/resilience/faults.py" in report
    assert "time.sleep" in report
    assert "by rank 0, and not by rank 1" in report
    assert "exitcode  : 75" in report


def _rank(rank: int, size: int, port: int, log: Path, settings: dict[str, object]) -> None:
    sys.stdout = sys.stderr = log.open("w", buffering=1)
    meeting = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in meeting.items()})
    torch.set_num_threads(1)
    config = tiny_config(**{"num_layers": 1, "eval_iters": 0, "log_interval": 1} | settings)
    run_job(lambda world: pretrain(config, world))


@contextmanager
def ranks_without_launcher(logs: list[Path], *, port: int = 0, first: int = 0, **settings: object) -> Iterator[Any]:
    """Forked ranks, of which rank 0 hosts the store and each prints to its log; all are ended afterwards.

    ``port``: of the store; ``first``: start only the ranks from this one on.
    """
    context, size = multiprocessing.get_context("fork"), len(logs)
    port = port or free_port()
    ranks = [context.Process(target=_rank, args=(n, size, port, logs[n], settings)) for n in range(first, size)]
    try:
        for rank in ranks:
            rank.start()
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


@pytest.mark.parametrize("stopped", [0, pytest.param(1, marks=pytest.mark.whole_matrix)])
def test_a_stopped_rank_is_reported(stopped: int, tmp_path: Path) -> None:
    """The store of a stopped rank 0 does not answer."""
    logs = [tmp_path / "0", tmp_path / "1"]
    with ranks_without_launcher(logs, train_iters=10**6, distributed_timeout_minutes=0.1) as ranks:
        while "iteration 3/" not in (logs[0].read_text() if logs[0].exists() else ""):
            assert all(rank.is_alive() for rank in ranks), [log.read_text() for log in logs]
            time.sleep(0.05)
        os.kill(ranks[stopped].pid, signal.SIGSTOP)
        began = time.monotonic()
        while "error: " not in logs[1 - stopped].read_text() and time.monotonic() < began + 60:
            time.sleep(0.05)
        assert time.monotonic() - began < 8, "the limit and 2 s"
        ranks[1 - stopped].join(300)
        assert ranks[1 - stopped].exitcode == 75
    report = logs[1 - stopped].read_text().partition("error: ")[2]
    assert f"rank {stopped} (process {ranks[stopped].pid}) did not join within 6 s" in report.splitlines()[0]
    assert ("no answer yet from rank 1" if stopped else "hosted by rank 0, does not answer") in report.splitlines()[0]
    assert f"rank {stopped}: no answer: its process has ended or is stopped" in report


@needs_proc
@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGHUP, marks=pytest.mark.whole_matrix)])
def test_when_the_launcher_dies_the_ranks_save_and_end(number: signal.Signals, tmp_path: Path) -> None:
    process = _start("--save", str(tmp_path))
    for line in process.stdout:
        if "iteration 3/" in line:
            break
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.send_signal(number)
    output = process.stdout.read()  # until the ranks, which also write there, have ended
    process.wait()
    deadline = time.monotonic() + 120
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
        ({"WORLD_SIZE": "0", "RANK": "0"}, "integer >= 1"),
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


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("visible", "variables", "index"),
    [(4, (), 3), (1, ("SLURM_GPUS_PER_TASK",), 0), (4, ("SLURM_GPUS_PER_TASK",), 3), (1, (), None)],
)
def test_the_gpu_of_a_rank(
    visible: int, variables: tuple[str, ...], index: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm may show a process only its own GPU; otherwise a rank without one is an error."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    for name, value in ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3"} | dict.fromkeys(variables, "1")).items():
        monkeypatch.setenv(name, value)
    world = World.from_environment()
    if index is None:
        with pytest.raises(LayoutError, match=r"local rank 3 has no GPU, this machine has 1; .*--gpus-per-task 1"):
            start_world(world)
    else:
        assert world.device == torch.device("cuda", index)


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({}, "MASTER_ADDR='' and MASTER_PORT=0"),
        ({"MASTER_PORT": "29500"}, "MASTER_ADDR=''"),
        ({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "none"}, "MASTER_PORT='none'"),
        ({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "65536"}, "from 1 to 65535"),
        ({"MASTER_ADDR": "127.0.0.1"}, "that rank 0 runs"),
        ({"MASTER_ADDR": "no such host"}, "check the address"),
    ],
)
def test_ranks_that_cannot_meet_say_so(
    environment: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank other than the first, whose connection has no other end."""
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    if "MASTER_ADDR" in environment and "MASTER_PORT" not in environment:
        environment = environment | {"MASTER_PORT": str(free_port())}
    for name, value in (environment | {"RANK": "1", "WORLD_SIZE": "2"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LayoutError, match=re.escape(words)) as error:
        start_world(World.from_environment(), timeout_minutes=0.02)
    assert len(str(error.value)) < 600 and "\n" not in str(error.value)


def test_an_error_before_the_ranks_have_joined_is_printed_by_a_rank_that_is_alone_with_it(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rank 0 prints at once; torchrun ends the others, or they print later: first the first rank of a machine."""
    waited: list[float] = []
    monkeypatch.setattr("megatron_core.parallel.launch.time.sleep", waited.append)
    for rank, local_rank, seconds in ((0, 0, []), (1, 1, [20.0]), (2, 0, [10.0])):
        monkeypatch.setenv("WORLD_SIZE", "4")
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))
        waited.clear()
        with pytest.raises(SystemExit) as ended:
            run_job(_refuse)
        assert ended.value.code == 1 and waited == seconds
        assert "error: a setting is wrong" in capfd.readouterr().err


def test_ctrl_c_before_the_ranks_have_joined_ends_all_at_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("megatron_core.parallel.launch.time.sleep", lambda seconds: pytest.fail("waits"))
    for rank, message in ((0, "error: interrupted\n"), (1, "")):
        for name, value in {"WORLD_SIZE": 2, "RANK": rank, "LOCAL_RANK": rank}.items():
            monkeypatch.setenv(name, str(value))
        with pytest.raises(SystemExit) as ended:
            run_job(_interrupt)
        assert ended.value.code == 130 and capfd.readouterr().err == message


def _interrupt(world: World) -> None:
    raise KeyboardInterrupt


def _refuse(world: World) -> None:
    raise LayoutError("a setting is wrong")


def test_a_port_that_is_taken_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        found = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in found.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(LayoutError, match=f"127.0.0.1:{port} failed: another process has this port"):
            start_world(World.from_environment(), timeout_minutes=0.02)


def test_out_of_memory_is_one_sentence_with_ways_out() -> None:
    error = RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 4000000000000 bytes.")
    status, message = exit_explanation(error) or (0, "")
    assert status == 1 and "allocating 4000000000000 bytes" in message and "--micro-batch-size" in message
    assert exit_explanation(RuntimeError("a bug of ours")) is None


def test_places_that_cannot_be_written_are_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    flags = ["--train-iters", "1", "--metrics-file", str(tmp_path / "file/metrics.jsonl")]
    done = run_program("pretrain_gpt.py", *TINY, *flags)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr and done.stderr.count("error: ") == 1
    assert str(tmp_path / "file") in done.stderr
    assert exit_explanation(OSError(28, "No space left on device")) == (
        1,
        "a file or the standard output cannot be used: No space left on device; choose another path, or free space "
        "there",
    )
