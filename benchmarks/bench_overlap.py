"""Measure for each switch that overlaps communication how much of it is hidden behind computation.

Trains a small model with the switch off and on, in turn, on CPU ranks of one machine. A line of the table has the time
of a step in which a rank only waits with the switch off (the time that could be hidden), the part of it that is hidden
with the switch on, and the times of both steps. Data moves between CPU ranks by copies, which no overlap hides;
therefore the collectives of a switch arrive over a simulated link (``slow_link``), whose bandwidth is that of the row.
Only waiting for this link counts, not for a rank that is late because other processes use its core. Prints a table and
appends it to benchmarks/results.csv; ``ratio`` there is the hidden part.

python -m benchmarks.bench_overlap

Transfers of offloading overlap always; without overlap, each is waited for when it starts (``offloading``).

To add a switch, append a ``Switch`` to ``SWITCHES``. For transfers that are not collectives, such as copies between
devices or files, use ``link=None``: then all time counts that the meter charges to the phases named in ``waits``, which
the engine marks with ``METER.phase("waiting for ...")``.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import tyro

from benchmarks.offloading import on_a_device, synchronous
from benchmarks.results import Row, append
from benchmarks.slow_link import SlowLink
from megatron_core.config import RunConfig
from megatron_core.features.matrix_optimizers import updates as matrix_updates
from megatron_core.parallel import World
from megatron_core.parallel.handles import Done
from megatron_core.reports.meter import METER, StepTimes
from megatron_core.training.setup import Run, set_up
from megatron_core.training.step import train_step
from megatron_core.verify.ranks import run_ranks

Flags = dict[str, Any]

SHAPE: Flags = {
    "num_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "seq_length": 256,
    "vocab_size": 1024,
    "micro_batch_size": 1,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "untie_embeddings_and_output_weights": True,
    "mock_data": True,
    "train_iters": 1000,
    "lr_decay_style": "constant",
}
EXPERTS: Flags = {
    "num_experts": 8,
    "moe_ffn_hidden_size": 256,
    "swiglu": True,
    "disable_bias_linear": True,
    "expert_model_parallel_size": 2,
    "moe_router_force_load_balancing": True,
}
TENSOR_PARALLEL: Flags = {"tensor_model_parallel_size": 2}
SEQUENCE_PARALLEL: Flags = TENSOR_PARALLEL | {"sequence_parallel": True}
IN_PARTS: Flags = {"tp_comm_overlap_chunks": 4}
ACTIVATIONS: Flags = {"cpu_offloading": True, "cpu_offloading_num_layers": 4, "bf16": False}
UPDATES: Flags = {"hidden_size": 512, "seq_length": 64, "vocab_size": 4096, "ddp_bucket_size": 2_000_000}
OPTIMIZER: Flags = {"optimizer_cpu_offload": True, "overlap_grad_reduce": True} | UPDATES
ON_DISK: Flags = {"zero_stage": 3, "zero3_param_offload_dir": "", "optimizer_cpu_offload": True}


@contextmanager
def matrices_in_turn() -> Iterator[None]:
    """Let the updates of matrices wait for each of their messages when it starts."""
    start = matrix_updates.start_all_to_all_rows

    def wait_at_once(*arguments: Any) -> tuple[torch.Tensor, Done]:
        received, handle = start(*arguments)
        handle.wait()
        return received, Done()

    matrix_updates.start_all_to_all_rows = wait_at_once
    try:
        yield
    finally:
        matrix_updates.start_all_to_all_rows = start


@dataclass(frozen=True, kw_only=True)
class Switch:
    """A switch that overlaps communication."""

    name: str
    flags: Flags
    """Settings that turn it on."""
    base: Flags = field(default_factory=dict)
    """Settings of both runs, besides ``SHAPE``."""
    off: Flags = field(default_factory=dict)
    """Settings that turn it off, where that is not the default."""
    waits: tuple[str, ...]
    """Patterns of the collectives (``all_to_all``), or without a link of the meter's phases and collectives, in which a
    rank only waits for it."""
    ranks: int = 2
    micro_batches: int = 4
    """Micro-batches of each rank."""
    link: float | None = 5e8
    """Bytes per second of the simulated link for the collectives of ``waits``; None: no link."""
    in_turn: Callable[[], AbstractContextManager[None]] = nullcontext
    """Turns the overlap off where no setting does: a context around the run."""
    offloads: bool = False
    """Whether the switch is the overlap of offloading, on ranks whose memory counts as a device's."""


SWITCHES = [
    Switch(
        name="gradient reduction",
        flags={"overlap_grad_reduce": True},
        base={"ddp_bucket_size": 500_000},
        waits=("all_reduce",),
        micro_batches=2,
        link=2e8,
    ),
    Switch(
        name="ZeRO-3 gathers",
        flags={"overlap_param_gather": True, "overlap_grad_reduce": True},
        base={"zero_stage": 3},
        waits=("all_gather",),
        micro_batches=1,
        link=2e8,
    ),
    Switch(
        name="expert all-to-all",
        flags={"overlap_moe_expert_parallel_comm": True},
        base=EXPERTS,
        waits=("all_to_all",),
        micro_batches=8,
        link=1e8,
    ),
    Switch(
        name="expert all-to-all, dualpipe_v",
        flags={"overlap_moe_expert_parallel_comm": True},
        base=EXPERTS | {"pipeline_model_parallel_size": 2, "pipeline_schedule": "dualpipe_v"},
        waits=("all_to_all",),
        ranks=4,
        micro_batches=8,
        link=1e8,
    ),
    Switch(
        name="matrices of Muon, tp2",
        flags={},
        base={"optimizer": "muon", "tensor_model_parallel_size": 2},
        waits=("all_to_all",),
        in_turn=matrices_in_turn,
        micro_batches=1,
        link=2e8,
    ),
    *(
        Switch(
            name=name,
            flags={"tp_comm_overlap": True},
            off={"tp_comm_overlap": False},
            base=base,
            waits=waits,
            micro_batches=1,
        )
        for name, base, waits in [
            ("input gradients, tp2", TENSOR_PARALLEL, ("all_reduce",)),
            ("products in parts, tp2", TENSOR_PARALLEL | IN_PARTS, ("all_reduce",)),
            ("products in parts, tp2 sp", SEQUENCE_PARALLEL | IN_PARTS, ("ring",)),
        ]
    ),
    *(
        Switch(
            name=name,
            flags={},
            base={"bf16": True, "ddp_bucket_size": 500_000, "use_distributed_optimizer": True} | base,
            waits=waits,
            ranks=ranks,
            micro_batches=1,
            link=link,
            offloads=True,
        )
        for name, ranks, base, waits, link in [
            ("activations to host memory", 2, ACTIVATIONS, ("copy_out",), 2e8),
            ("activations from host memory", 2, ACTIVATIONS, ("copy_in",), 2e8),
            ("gradients to host memory", 2, OPTIMIZER, ("copy_out",), 5e8),
            ("weights from host memory", 1, UPDATES | {"optimizer_cpu_offload": True}, ("copy_in",), 2e9),
            ("reads of weights on disk", 2, ON_DISK, ("read",), 2e8),
            ("optimizer state on disk", 1, {"optimizer_offload_dir": ""} | UPDATES, ("read", "write"), None),
        ]
    ),
]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Measure the hidden part of communication."""

    only: str = ""
    """Measure only switches whose name contains this."""
    rounds: int = 2
    """Number of rounds; in each the switch is off, then on."""
    steps: int = 3
    """Timed steps of each round, after one warm-up step."""


Measured = tuple[list[float], list[float]]
"""Seconds of each step, and of its waiting."""


def waiting(times: StepTimes, patterns: tuple[str, ...]) -> float:
    """Seconds of a step in which the rank only waited for the collectives, or phases, of ``patterns``."""
    found = {name.rpartition(" ")[2]: 0.0 for name in times.traffic} | times.phases
    for name, traffic in times.traffic.items():
        found[name.rpartition(" ")[2]] += traffic.exposed
    return sum(seconds for name, seconds in found.items() if any(fnmatch(name, each) for each in patterns))


@contextmanager
def metered(run: Run, switch: Switch) -> Iterator[Callable[[], float]]:
    """Charge times to the meter, and delay the switch's collectives; yield the time waited since the last call."""
    METER.start(run.groups, run.world.device)
    link = SlowLink(switch.waits, switch.link or float("inf"))
    counted = 0.0

    def waited() -> float:
        nonlocal counted
        times, before = METER.take(), counted
        counted = link.exposed
        return link.exposed - before if switch.link else waiting(times, switch.waits)

    with link.installed() if switch.link else nullcontext():
        yield waited
    METER.stop()


def measure(switch: Switch, steps: int, *, on: bool) -> Measured:
    """One rank of a run."""
    flags = switch.flags if on else switch.off
    pipeline = int((switch.base | flags).get("pipeline_model_parallel_size", 1))
    tensor = int(switch.base.get("tensor_model_parallel_size", 1))
    batch = switch.micro_batches * SHAPE["micro_batch_size"] * switch.ranks // pipeline // tensor
    world = World(dist.get_rank(), dist.get_world_size(), 0, torch.device("cpu"))
    settings = SHAPE | switch.base | {"global_batch_size": batch} | flags
    seconds, waits = [], []
    with ExitStack() as stack:
        if not on:
            stack.enter_context(switch.in_turn())
        if switch.offloads:
            stack.enter_context(on_a_device())
            stack.enter_context(nullcontext() if on else synchronous())
        for name in [name for name in settings if name.endswith("offload_dir")]:
            settings[name] = stack.enter_context(TemporaryDirectory())
        run = set_up(RunConfig.from_flat(settings), world)
        waited = stack.enter_context(metered(run, switch))
        train_step(run)
        waited()
        for _ in range(steps):
            began = time.perf_counter()
            train_step(run)
            seconds.append(time.perf_counter() - began)
            waits.append(waited())
    return seconds, waits


def compare(switch: Switch, settings: Settings) -> Row:
    """Run with the switch off and on in turn; print its line, and return its row."""
    found: dict[bool, Measured] = {False: ([], []), True: ([], [])}
    for _ in range(settings.rounds):
        for on in (False, True):
            one = partial(measure, on=on)
            for seconds, waits in run_ranks(switch.ranks, one, switch, settings.steps, timeout=300.0):
                found[on][0].extend(seconds)
                found[on][1].extend(waits)
    (off_step, off), (on_step, on_waits) = ([statistics.median(each) for each in found[on]] for on in (False, True))
    hidden = 1.0 - on_waits / off if off else 0.0
    cells = (1000 * off, 100 * hidden, 1000 * off_step, 1000 * on_step)
    print(f"{switch.name:32} {cells[0]:10.1f} {cells[1]:8.0f} % {cells[2]:10.1f} {cells[3]:10.1f}", flush=True)
    return Row(switch.name, on_step, "s", ratio=hidden)


def main(settings: Settings) -> None:
    """Measure all switches."""
    torch.set_num_threads(1)
    print(f"{'switch':32} {'could, ms':>10} {'hidden':>10} {'off, ms':>10} {'on, ms':>10}")
    append("overlap", [compare(switch, settings) for switch in SWITCHES if settings.only in switch.name])


if __name__ == "__main__":
    main(tyro.cli(Settings))
