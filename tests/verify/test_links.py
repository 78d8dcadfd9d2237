"""Links within and between hosts are measured by the groups that use them in training."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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
GATHERS = links.REPEATS * (links.SMALL_GATHERS + 1)


class Clock:
    """A clock on which only gathers of the last rank take time: the slowest rank counts."""

    def __init__(self, rank: int) -> None:
        self.groups: list[list[int]] = []
        self._rank = rank
        self._now = 0.0
        self._gather = links.all_gather_flat_

    def perf_counter(self) -> float:
        """Seconds."""
        return self._now

    def gather(self, full: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> None:
        """Gather over one of the links; the first gather of a size takes longer."""
        self._gather(full, shard, group)
        ranks = dist.get_process_group_ranks(group)
        is_first = len(self.groups) % GATHERS in (0, links.REPEATS * links.SMALL_GATHERS)
        self.groups.append(ranks)
        link = WITHIN if ranks[1] == ranks[0] + 1 else BETWEEN
        if self._rank == 3:
            self._now += link.latency + shard.nbytes / link.bandwidth + is_first


def measure() -> tuple[Hardware, list[list[int]]]:
    """The links of two hosts with two ranks, and the groups that gathered."""
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    clock = Clock(dist.get_rank())
    links.all_gather_flat_, links.time = clock.gather, clock
    world = World(dist.get_rank(), dist.get_world_size(), 0, torch.device("cpu"))
    return links.measured_links(read_hardware("h100"), world), clock.groups


def test_links_are_those_of_the_groups() -> None:
    for rank, (machine, groups) in enumerate(run_ranks(4, measure)):
        host, number = rank // 2 * 2, rank % 2
        assert groups == [[host, host + 1]] * GATHERS + [[number, number + 2]] * GATHERS
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
