"""A whole pretraining job on this rank."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from megatron_core.checkpoint import find_checkpoint
from megatron_core.config import RunConfig
from megatron_core.config.file import write_config
from megatron_core.config.validate import check
from megatron_core.errors import ConfigError
from megatron_core.monitor.build import build_sinks
from megatron_core.monitor.events import Sink
from megatron_core.ops import backend
from megatron_core.parallel import World, start_world
from megatron_core.pipeline_parallel.partition import describe
from megatron_core.training.data import DatasetsProvider
from megatron_core.training.loop import train
from megatron_core.training.setup import Run, set_up


def pretrain(config: RunConfig, world: World, datasets_provider: DatasetsProvider | None = None) -> None:
    """Validate, set up, train; ``datasets_provider`` makes the data sets of ``dataloader_type=external``."""
    check(config, world.size)
    parallel = config.parallel
    start_world(world, backend=parallel.distributed_backend, timeout_minutes=parallel.distributed_timeout_minutes)
    run = set_up(config, world, datasets_provider)
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
    where = f"layout {run.layout} on {run.world.size} ranks" if run.world.size > 1 else run.layout
    print(f"{where} ({run.world.device.type}); {counted:,} parameters on rank 0")
    print(describe(run.layers, run.plans.place))
    print(f"kernels: {kernels(run)}")
    for note in notes(run):
        print(f"note: {note}")
    if run.state.iteration:
        print(f"goes on from iteration {run.state.iteration}, {run.state.consumed_samples} samples")
    sys.stdout.flush()
    if run.config.checkpoint.save:
        keep_config(run.config, Path(run.config.checkpoint.save))


def kernels(run: Run) -> str:
    """Which bodies of the fused operations serve, and where it is the slower one, why."""
    dtype = getattr(torch, run.config.training.compute_dtype)
    return backend.describe(run.config.model.kernel_backend, run.world.device.type, dtype)


def notes(run: Run) -> Iterator[str]:
    """What a user should know before the training starts."""
    settings, iteration = run.config.checkpoint, run.state.iteration
    if run.config.training.eval_iters:
        yield from run.splits.notes
    if iteration >= run.total_iterations:
        yield f"nothing to train: the {run.total_iterations} iterations that were asked for are done already"
    if settings.save and not settings.load and find_checkpoint(settings.save) is not None:
        yield (
            f"{settings.save} holds checkpoints of an earlier run, and this one starts from scratch; go on with "
            f"--load {settings.save}, or choose another folder to keep them apart"
        )


def keep_config(config: RunConfig, folder: Path) -> None:
    """Write the configuration into the folder of checkpoints, which this makes."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_config(config, folder / "config.yaml")
    except OSError as error:
        raise ConfigError(f"save={str(folder)!r} cannot be written: {error}; give another folder") from None
