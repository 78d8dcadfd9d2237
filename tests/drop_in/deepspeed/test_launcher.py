"""The command ``deepspeed``."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from deepspeed.launcher.runner import fetch_hostfile, main, parse_inclusion_exclusion
from megatron_core.errors import ConfigError

PROGRAM = """
import argparse
import deepspeed
import torch.distributed as dist
parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--out")
args = parser.parse_args()
deepspeed.init_distributed()
open(f"{args.out}.{dist.get_rank()}", "w").write(f"{args.local_rank} of {dist.get_world_size()}: {deepspeed.__file__}")
"""


def test_ranks_get_their_local_rank(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "megatron_core.drop_in", "-m", "deepspeed.launcher.runner", "-i", "localhost:0,1"]
    arguments = ["--master_port", str(port), str(program), "--deepspeed", "--out", str(tmp_path / "rank")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run([*command, *arguments], env=environment, capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stderr
    for rank in range(2):
        text = Path(f"{tmp_path}/rank.{rank}").read_text()
        assert text.startswith(f"{rank} of 2: ") and "drop_in" in text


@pytest.mark.parametrize("flags", (["-i", "other:0"], ["-i", "localhost"], ["-i", "localhost:0", "--num_gpus", "1"]))
def test_other_devices_are_refused(flags: list[str]) -> None:
    with pytest.raises(ConfigError, match="must be localhost:GPU,GPU without --num_gpus"):
        main([*flags, "train.py"])


def test_several_machines_need_no_ssh() -> None:
    with pytest.raises(ConfigError, match="start this command on each machine with --no_ssh"):
        main(["--num_nodes", "2", "train.py"])


def test_the_ranks_of_this_machine_are_listed_without_a_hostfile(tmp_path: Path) -> None:
    """As GPT-NeoX counts its GPUs."""
    assert fetch_hostfile(str(tmp_path / "absent")) is None
    assert parse_inclusion_exclusion({"localhost": 3}, None, "") == {"localhost": [0, 1, 2]}
    with pytest.raises(ConfigError, match="set CUDA_VISIBLE_DEVICES instead"):
        parse_inclusion_exclusion({"localhost": 3}, "localhost:0", None)
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("one slots=2\n")
    with pytest.raises(ConfigError, match="needs ssh"):
        fetch_hostfile(str(hostfile))
