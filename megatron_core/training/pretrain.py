"""A whole pretraining job on this rank."""

from __future__ import annotations

import sys
from pathlib import Path

from megatron_core.config import RunConfig
from megatron_core.config.file import write_config
from megatron_core.config.validate import check
from megatron_core.monitor.build import build_sinks
from megatron_core.monitor.events import Sink
from megatron_core.parallel import World, start_world
from megatron_core.pipeline_parallel.partition import describe
from megatron_core.training.loop import train
from megatron_core.training.setup import Run, set_up


def pretrain(config: RunConfig, world: World) -> None:
    """Validate, set up, train."""
    check(config, world.size)
    parallel = config.parallel
    start_world(world, backend=parallel.distributed_backend, timeout_minutes=parallel.distributed_timeout_minutes)
    run = set_up(config, world)
    sinks: list[Sink] = []
    if world.rank == 0:
        introduce(run)
        sinks = build_sinks(config.monitor, config.checkpoint.save, start_iteration=run.state.iteration)
    try:
        train(run, sinks)
    finally:
        for sink in sinks:
            sink.close()


def introduce(run: Run) -> None:
    """Say what is about to run, and keep the configuration beside the checkpoints."""
    counted = sum(p.numel() for stage in run.stages.values() for p in stage.parameters())
    print(f"layout {run.layout} on {run.world.size} ranks ({run.world.device.type}); {counted:,} parameters on rank 0")
    print(describe(run.layers, run.plan.place))
    for note in run.splits.notes:
        print(f"note: {note}")
    if run.state.iteration:
        print(f"goes on from iteration {run.state.iteration}, {run.state.consumed_samples} samples")
    sys.stdout.flush()
    if run.config.checkpoint.save:
        folder = Path(run.config.checkpoint.save)
        folder.mkdir(parents=True, exist_ok=True)
        write_config(run.config, folder / "config.yaml")
