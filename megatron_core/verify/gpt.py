"""The GPT of ``pretrain_gpt.py`` under proof: a few of its own training steps, recorded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron_core.config import RunConfig
from megatron_core.config.layout import Layout, every_layout
from megatron_core.config.validate import problems
from megatron_core.datasets.packing import packing_of
from megatron_core.training.setup import Run, set_up
from megatron_core.training.step import train_step
from megatron_core.verify.ragged import RaggedDataset
from megatron_core.verify.ranks import run_ranks, this_world
from megatron_core.verify.record import Record, Trace, assemble


@dataclass(frozen=True)
class GPTExperiment:
    """Trains the GPT of ``config`` for ``steps`` steps under any layout, on ragged made-up batches."""

    config: RunConfig
    steps: int = 3
    few_micro_batches: bool = False
    """Without a pipeline take two micro-batches, however many samples there are: enough to accumulate over."""
    own_settings: Mapping[str, object] = field(default_factory=dict)
    """Settings that no word of a layout says, for every layout but one process."""

    def __call__(self, layout: Layout, dtype: str) -> Record:
        """This rank's record; called in every rank of a world of ``layout.world_size``."""
        config = configured(self.config, layout, dtype, self.own_settings if layout.world_size > 1 else {})
        if self.few_micro_batches and layout.pp == 1:
            each = config.training.final_batch_size(layout.dp) // layout.dp
            config = RunConfig.from_flat(config.flat() | {"micro_batch_size": max(each // 2, 1)})
        return record_training(config, self.steps)


def fitting_layouts(config: RunConfig, world_size: int) -> list[Layout]:
    """Every layout of ``world_size`` ranks that ``config`` can be trained in."""
    candidates = every_layout(world_size, config.model.num_layers)
    return [each for each in candidates if not any(problems(configured(config, each, "float64"), world_size))]


def configured(
    config: RunConfig, layout: Layout, dtype: str, own_settings: Mapping[str, object] | None = None
) -> RunConfig:
    """``config`` under a layout and in a dtype, maybe with settings that no word of a layout says."""
    precision = {"fp64": dtype == "float64", "bf16": dtype == "bfloat16", "fp16": False}
    return RunConfig.from_flat(config.flat() | layout.settings() | precision | dict(own_settings or {}))


def record_training(config: RunConfig, steps: int) -> Record:
    """Train ``steps`` steps as ``pretrain_gpt.py`` would, in the world that this rank is in."""
    run = set_up(config, this_world())
    packing = packing_of(config.data, run.tokenizer)
    eod = None if packing is None else packing.eod
    run.train_loader = run.loader(RaggedDataset(run.vocab_size, config.data.seq_length, eod))
    record = Record()
    _record_gradients(run, record)
    for _ in range(steps):
        result = train_step(run)
        record.losses.append(result.loss)
        record.norms.append(result.grad_norm)
    run.data_parallel.finish_gather()
    record.add_weights(run.stages.values())
    return record


def _record_gradients(run: Run, record: Record) -> None:
    """Copy all final gradients just before each optimizer step."""
    step = run.optimizer.step

    def recording_step(lr: float):
        record.add_gradients(run.data_parallel, run.state.iteration)
        return step(lr)

    run.optimizer.step = recording_step


def trace_training(config: RunConfig, world_size: int, steps: int = 3) -> Trace:
    """Train ``config`` on ``world_size`` ranks of this machine and put their records together."""
    return assemble(run_ranks(world_size, record_training, config, steps))
