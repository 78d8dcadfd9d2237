"""``--recover in-process`` through ``pretrain_gpt.py`` on two simulated GPUs, from the first step to the checkpoint.

It shows the order of events, not that NCCL's abort returns: this has not run on a GPU.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from subprocess import STDOUT

import pytest
import torch

from tests.checkpoint.runs import stored
from tests.memory import needs_proc
from tests.programs import ROOT, ForkedPopen, free_port

pytestmark = needs_proc
MODEL = {"num-layers": 1, "hidden-size": 32, "num-attention-heads": 2, "seq-length": 16, "vocab-size": 64}
RUN = {"micro-batch-size": 1, "global-batch-size": 4, "train-iters": 6, "eval-iters": 0, "peak-tflops": 1}
RUN |= {"hidden-dropout": 0.1, "attention-dropout": 0, "recover": "in-process"}
FLAGS = ["--mock-data", "--bf16", *(f"--{name}={value}" for name, value in (MODEL | RUN).items())]
KILLED = ["kill@1:2", "kill@1:4"]
SECONDS = 150.0


def train(
    folder: Path, *faults: str, minutes: float = 1.0, hanging_abort: str = ""
) -> tuple[dict[str, torch.Tensor], str]:
    """The last checkpoint of a job that must succeed, and the output of its first rank."""
    folder.mkdir()
    port = str(free_port())
    flags = [
        *FLAGS,
        f"--distributed-timeout-minutes={minutes}",
        "--save",
        str(folder / "save"),
        *(["--inject-fault", *faults] if faults else []),
    ]
    ranks = []
    for rank in range(2):
        variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "OMP_NUM_THREADS": 1}
        environment = os.environ | {name: str(value) for name, value in variables.items()}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "HANGING_ABORT": hanging_abort}
        command = [sys.executable, "-m", "tests.simulated_gpu.program", *flags]
        with (folder / f"log{rank}").open("w") as log:
            ranks.append(ForkedPopen(command, env=environment, cwd=ROOT, stdout=log, stderr=STDOUT))
    try:
        statuses = [rank.wait(SECONDS) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    output = (folder / "log0").read_text()
    assert statuses == [0, 0], output + (folder / "log1").read_text()
    return stored(folder / "save" / "iter_0000006"), output


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The last checkpoint without faults."""
    tensors, output = train(tmp_path_factory.mktemp("undisturbed") / "run")
    assert "note: recover=in-process has not been tested on GPUs yet" in output
    return tensors


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def test_aborted_ranks_continue_or_are_replaced(undisturbed: dict[str, torch.Tensor], tmp_path: Path) -> None:
    """Rank 1 dies twice. Rank 0 aborts its communicators and continues; its second abort hangs, so that a new process
    takes its place."""
    tensors, output = train(tmp_path / "run", *KILLED, hanging_abort="0:2")
    assert_same(tensors, undisturbed)
    assert output.count("simulated GPU: abort 0:1") == output.count("simulated GPU: abort 0:2") == 1
    first, second = (line for line in output.splitlines() if line.startswith("recovered in "))
    assert "a new process takes the place of rank 1" in first
    assert "rank 0 is replaced by a new process: aborting NCCL's communicators did not end within 3 s" in output
    assert "new processes take the place of ranks 0, 1; training continues after iteration 3" in second


@pytest.mark.whole_matrix
def test_a_rank_that_hangs(undisturbed: dict[str, torch.Tensor], tmp_path: Path) -> None:
    tensors, output = train(tmp_path / "run", "hang@1:3", minutes=0.05)
    assert_same(tensors, undisturbed)
    (line,) = (line for line in output.splitlines() if line.startswith("recovered in "))
    assert "has made no progress for" in line and "training continues after iteration 2" in line
