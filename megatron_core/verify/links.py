"""Measure the links within and between the hosts of a job for the planner."""

import time
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from megatron_core.errors import ConfigError
from megatron_core.parallel import World
from megatron_core.parallel.collectives import all_gather_flat_
from megatron_core.planner.hardware import Hardware, Link
from megatron_core.reports.gpu_notes import ranks_per_node
from megatron_core.reports.reference_rate import wait_for_device
from megatron_core.verify.machine import MESSAGES, fitted_link

SMALL_GATHERS = 20
"""All-gathers of a measurement of the small message, because ranks leave a barrier at different times."""
REPEATS = 4
"""Measurements, the shortest of which counts."""
SOURCE = "; links by megatron-diagnose --links"
"""End of the source of a machine with measured links."""


def measured_links(machine: Hardware, world: World) -> Hardware:
    """``machine`` with the links of this job, whose ranks all call this together.

    Within hosts, the ranks of each host gather; between hosts, the ranks with the same number on their host, so that
    all ranks of a host share its links to the others, as in training.
    Errors: ``ConfigError`` if there is only one host, or the hosts do not have the same number of ranks.
    """
    ranks = ranks_per_node(world.size)
    if world.size % ranks or world.size == ranks:
        raise ConfigError(
            f"links of {world.size} ranks, {ranks} of them on this host, cannot be measured; start the same number of "
            "ranks on two hosts or more, by torchrun --nnodes 2 --nproc-per-node N"
        )
    hosts = [range(first, first + ranks) for first in range(0, world.size, ranks)]
    numbers = [range(number, world.size, ranks) for number in range(ranks)]
    return replace(
        machine,
        source=machine.source.removesuffix(SOURCE) + SOURCE,
        devices_per_node=ranks,
        intra=_link(hosts, world) if ranks > 1 else machine.intra,
        inter=_link(numbers, world),
    )


def _link(groups: Sequence[Sequence[int]], world: World) -> Link:
    """Fit a link to the times of all-gathers in all ``groups`` at the same time, on the slowest rank."""
    handles = [dist.new_group(list(ranks)) for ranks in groups]
    group = next(handle for handle, ranks in zip(handles, groups, strict=True) if world.rank in ranks)
    large = MESSAGES[-1] if world.device.type == "cuda" else MESSAGES[-2]
    times = {}
    for size, count in ((MESSAGES[0], SMALL_GATHERS), (large, 1)):
        shard = torch.zeros(size, dtype=torch.uint8, device=world.device)
        full = torch.zeros(size * group.size(), dtype=torch.uint8, device=world.device)
        seconds = torch.zeros(REPEATS, dtype=torch.float64, device=world.device)
        for repeat in range(REPEATS):
            dist.barrier()  # else a group that gets more of the link would run ahead, and leave it to the others
            began = time.perf_counter()
            for _ in range(count):
                all_gather_flat_(full, shard, group)
            wait_for_device(world.device)
            seconds[repeat] = (time.perf_counter() - began) / count
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        times[size] = seconds.min().item()
    return fitted_link(group.size(), times)
