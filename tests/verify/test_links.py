"""Links within and between hosts are measured by the groups that use them in training."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_core.parallel import World
from megatron_core.planner.hardware import Hardware, Link, read_hardware
from megatron_core.verify import links
from megatron_core.verify.machine import MESSAGES
from megatron_core.verify.ranks import run_ranks

ROOT = Path(__file__).parents[2]
WITHIN, BETWEEN = Link(bandwidth=1e9, latency=1e-5), Link(bandwidth=1e7, latency=1e-3)


def measure() -> tuple[Hardware, list[list[int]]]:
    """The links of two hosts with two ranks, on a clock with known links; the groups that gathered."""
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    rank = dist.get_rank()
    groups: list[list[int]] = []
    gather = links.all_gather_flat_

    def record(full: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> Any:
        groups.append(dist.get_process_group_ranks(group))
        return gather(full, shard, group)

    def clock(call: Callable[[], object], device: torch.device, rounds: int) -> float:
        call()
        link = WITHIN if len(groups) <= 2 else BETWEEN
        size = MESSAGES[0] if len(groups) % 2 else MESSAGES[-2]
        # Another rank's clock stands still: the slowest one counts.
        return link.latency + size / link.bandwidth if rank == 3 else 0.0

    links.all_gather_flat_, links.best_time = record, clock
    world = World(rank, dist.get_world_size(), 0, torch.device("cpu"))
    return links.measured_links(read_hardware("h100"), world), groups


def test_links_are_those_of_the_groups() -> None:
    ranks = run_ranks(4, measure)
    for rank, (machine, groups) in enumerate(ranks):
        host, number = rank // 2 * 2, rank % 2
        assert groups == [[host, host + 1]] * 2 + [[number, number + 2]] * 2
        assert machine.devices_per_node == 2 and machine.memory_bytes == read_hardware("h100").memory_bytes
        for fitted, link in ((machine.intra, WITHIN), (machine.inter, BETWEEN)):
            assert fitted.bandwidth == pytest.approx(link.bandwidth)
            assert fitted.latency == pytest.approx(link.latency + MESSAGES[0] / link.bandwidth)
        assert machine.source.endswith(links.SOURCE)


def start(tmp_path: Path, *flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command of one rank."""
    words = [sys.executable, "-m", "megatron_core.commands.diagnose", "--links", *flags]
    words += ["--output", str(tmp_path / "hosts.json")]
    return subprocess.run(
        words, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, check=False, timeout=120
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [((), "give it by --hardware"), (("--hardware", "h100"), "two hosts or more")],
)
def test_what_is_missing_is_named(flags: tuple[str, ...], message: str, tmp_path: Path) -> None:
    result = start(tmp_path, *flags)
    assert result.returncode == 1
    assert message in result.stderr and "Traceback" not in result.stderr
    assert not (tmp_path / "hosts.json").exists()
