"""From a configuration to a run that is ready to take steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

from megatron_core import parallel_state
from megatron_core.config import RunConfig
from megatron_core.config.layout import Layout
from megatron_core.data_parallel import DataParallel
from megatron_core.datasets import Dataset, Splits
from megatron_core.datasets.loader import BatchLoader
from megatron_core.datasets.packing import packing_of
from megatron_core.errors import ConfigError
from megatron_core.models import GPTModel
from megatron_core.models.build import build_stages
from megatron_core.optimizer.lr_schedule import LearningRateSchedule
from megatron_core.optimizer.optimizer import Optimizer, make_loss_scale
from megatron_core.parallel import ParallelGroups, World, poison
from megatron_core.pipeline_parallel.executor import MessageFormat
from megatron_core.pipeline_parallel.p2p import Links
from megatron_core.pipeline_parallel.trace import TraceWriter
from megatron_core.tokenizers import Tokenizer, tokenizer_of
from megatron_core.training.data import DatasetsProvider, make_splits, vocabulary_size
from megatron_core.training.pipeline_trace import trace_writer
from megatron_core.training.plans import Plans
from megatron_core.training.state import TrainState, load_state
from megatron_core.training.step_size import StepSize


@dataclass
class Run:
    """All that a training step touches."""

    config: RunConfig
    world: World
    groups: ParallelGroups
    vocab_size: int
    tokenizer: Tokenizer | None
    layers: list[range]
    """The layers of every stage of the whole model."""
    stages: dict[int, GPTModel]
    """This rank's stages by number."""
    plans: Plans
    trace: TraceWriter | None
    links: Links
    message: MessageFormat
    data_parallel: DataParallel
    optimizer: Optimizer
    schedule: LearningRateSchedule
    splits: Splits
    state: TrainState
    total_iterations: int
    """Steps of the whole training, those before a resume included."""
    train_loader: BatchLoader = field(init=False)

    def __post_init__(self) -> None:
        """Whoever puts other data in sets another loader."""
        self.train_loader = self.loader(self.splits.train)

    def step_after(self, consumed_samples: int) -> StepSize:
        """The size of the step that follows so many samples."""
        return StepSize.at(self.config, self.groups.size("dp"), consumed_samples)

    @property
    def counts(self) -> float:
        """1 on the ranks whose losses count, 0 on the tensor-parallel copies of them."""
        return float(self.groups.index("tp") == 0 and self.groups.index("cp") == 0)

    @property
    def layout(self) -> str:
        """The layout in a few words, as ``tp2 pp2 v2 sp``."""
        own = self.config.parallel.pipeline_plan
        layout = str(Layout.of(self.config.parallel, self.config.model.num_layers, self.world.size))
        return f"{layout} plan {Path(own).name}" if own else layout

    def loader(self, dataset: Dataset) -> BatchLoader:
        """This data-parallel rank's batches of ``dataset``."""
        return BatchLoader(
            dataset,
            self.config.training.micro_batch_size,
            self.groups.index("dp"),
            self.groups.size("dp"),
            self.vocab_size,
            packing_of(self.config.data, self.tokenizer),
            num_workers=self.config.data.num_workers,
            pin_memory=self.world.device.type == "cuda",
        )


def message_format(config: RunConfig, groups: ParallelGroups, device: torch.device) -> MessageFormat:
    """What travels between stages: ``[s, b, h]``, ``[s/tp, b, h]`` with sequence parallel."""
    length = config.data.seq_length
    if config.parallel.sequence_parallel:
        length //= groups.size("tp")
    shape = (length, config.training.micro_batch_size, config.model.hidden_size)
    return MessageFormat(shape, getattr(torch, config.training.compute_dtype), device)


def set_up(config: RunConfig, world: World, datasets_provider: DatasetsProvider | None = None) -> Run:
    """Build everything: plan, groups, data, model, optimizer; and load the checkpoint if one is named.

    ``datasets_provider`` makes the data sets of ``dataloader_type=external``.
    """
    if config.monitor.poison_buffers:
        poison.turn_on()
    parallel = config.parallel
    plans = Plans(config, parallel.data_parallel_size(world.size))
    groups = parallel_state.make_groups(parallel, world, ends=(plans.place[0], plans.place[-1]))
    tokenizer = tokenizer_of(config.data)
    vocab_size = vocabulary_size(config, tokenizer)
    splits = make_splits(config, groups.size("dp"), tokenizer, vocab_size, datasets_provider)
    if splits.train is None:
        raise ConfigError("there is no data to train on; give --data-path or --train-data-path")
    layers, stages = build_stages(config, groups, vocab_size, world.device, place=plans.place)
    data_parallel = DataParallel(
        stages,
        groups,
        sharded=parallel.use_distributed_optimizer,
        overlap_grad_reduce=parallel.overlap_grad_reduce,
        overlap_param_gather=parallel.overlap_param_gather,
        bucket_size=parallel.ddp_bucket_size,
        device=world.device,
    )
    loss_scale = make_loss_scale(config.optimizer, getattr(torch, config.training.compute_dtype))
    optimizer = Optimizer(data_parallel, config.optimizer, groups, loss_scale, config.model.kernel_backend)
    state = load_state(config, data_parallel, optimizer) if config.checkpoint.load else TrainState()
    left = config.training.steps_left(groups.size("dp"), state.iteration, state.consumed_samples)
    total = state.iteration + left
    links = Links(groups)
    links.connect(world.device, plans.place)
    return Run(
        config=config,
        world=world,
        groups=groups,
        vocab_size=vocab_size,
        tokenizer=tokenizer,
        layers=layers,
        stages=stages,
        plans=plans,
        trace=trace_writer(config, groups, plans.place),
        links=links,
        message=message_format(config, groups, world.device),
        data_parallel=data_parallel,
        optimizer=optimizer,
        schedule=LearningRateSchedule(config.optimizer, total),
        total_iterations=total,
        splits=splits,
        state=state,
    )
