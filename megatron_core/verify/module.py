"""Test a custom model: any modules built from the parallel layers."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from megatron_core.config import OptimizerConfig, RunConfig
from megatron_core.data_parallel import BucketMemory, DataParallel, DataParallelSettings
from megatron_core.errors import LayoutError
from megatron_core.optimizer.loss_scale import LossScale
from megatron_core.optimizer.sharded import Optimizer
from megatron_core.parallel import ParallelGroups
from megatron_core.parallel.configured import make_groups
from megatron_core.parallel.micro_batch import SequenceSplit
from megatron_core.pipeline_parallel.messages import MessageFormat
from megatron_core.pipeline_parallel.p2p import PipelineP2P
from megatron_core.planner.layout import Layout
from megatron_core.reports.hash_records import HashRecord
from megatron_core.reports.state_hashes import HashedSteps, StateHashes
from megatron_core.schedules import make_plan
from megatron_core.schedules.actions import Plan
from megatron_core.schedules.checks import check_plan
from megatron_core.tensor_parallel import ModelParallelConfig
from megatron_core.training.driver import StepHooks, StepOutcome, StepRates, StepWork, Trainable, take_step
from megatron_core.verify.ranks import this_world
from megatron_core.verify.trace import RankTrace

Batch = Mapping[str, Tensor]


class ModelUnderTest(ABC):
    """Interface of a model and its data for the parity command.

    Initial weights must be functions of the parameters' names (``parallel.initialization.initialise_by_name``), and
    batches functions of the sample indices: nothing may depend on the layout. The names of a stage's parameters come
    from ``named_global_parameters`` if the stage has this method, else from ``named_parameters``; names must not depend
    on the stage.
    """

    @abstractmethod
    def build(self, stage: int, num_stages: int, groups: ParallelGroups, options: ModelParallelConfig) -> nn.Module:
        """Build stage ``stage`` of ``num_stages``; ``options`` contain dtype, device and sequence parallelism."""

    @abstractmethod
    def samples(self, first: int, count: int) -> Batch:
        """Return the global samples ``first ... first + count - 1`` as one micro-batch on the CPU.

        Floating-point tensors are cast to the dtype of the run.
        """

    @abstractmethod
    def count(self, batch: Batch) -> float:
        """Return the number of terms in the sum of losses of ``batch``, the local part of a micro-batch."""

    @abstractmethod
    def forward(self, module: nn.Module, batch: Batch, hidden: Tensor | None) -> Tensor:
        """Run a stage; return the sum of losses on the last stage, and the next stage's input on the others."""

    def local(self, batch: Batch, split: SequenceSplit) -> Batch:
        """Return this rank's tokens of whole sequences under context parallelism, for tensors ``[b, s, ...]``.

        Override it for tensors with other dims; the positions of the tokens are ``split.positions(s)``.
        """
        return {name: split.local(tensor) for name, tensor in batch.items()}

    def message_shape(self, batch: Batch) -> tuple[int, ...]:
        """Shape of the messages between stages for the local part of a batch, before sequence parallelism splits the
        first dimension."""
        raise LayoutError(f"{type(self).__name__} defines no message_shape, so that it cannot be split over a pipeline")


@dataclass(frozen=True)
class ModuleExperiment:
    """Trains ``model`` for ``steps`` steps under any layout, with this project's data parallelism and AdamW."""

    model: ModelUnderTest
    steps: int = 3
    global_batch_size: int = 8
    micro_batch_size: int = 1

    def __call__(self, layout: Layout, dtype: str) -> RankTrace:
        """Train and return this rank's trace; called in every rank of a world of ``layout.world_size``."""
        return _Training(self, layout, dtype).run()

    def hashes(self, layout: Layout, dtype: str) -> list[HashRecord]:
        """Train and return the records of the initial state and of each step, equal on all ranks."""
        return _Training(self, layout, dtype).hashed()


OPTIMIZER = OptimizerConfig(lr=1e-3, adam_eps=1e-3, clip_grad=0.5)
"""The settings of a shrunk GPT; see ``verify.shrink`` for the reasons."""


class _Training:
    """One rank's training."""

    def __init__(self, experiment: ModuleExperiment, layout: Layout, dtype: str) -> None:
        self.experiment = experiment
        self.model = experiment.model
        world = this_world()
        config = RunConfig.from_flat(layout.settings()).parallel
        self.device = world.device
        self.dtype = getattr(torch, dtype)
        self.num_microbatches = self._num_microbatches(layout)
        self.plan = _plan(layout, self.num_microbatches)
        stage_to_rank = self.plan.stage_to_rank
        groups = make_groups(config, world, ends=(stage_to_rank[0], stage_to_rank[-1]))
        split = SequenceSplit.of(groups, sequence_parallel=layout.sequence_parallel)
        options = ModelParallelConfig(
            sequence_parallel=layout.sequence_parallel, params_dtype=self.dtype, device=self.device
        )
        self.stages = {
            stage: self.model.build(stage, len(stage_to_rank), groups, options)
            for stage, rank in enumerate(stage_to_rank)
            if rank == groups.index("pp")
        }
        data_parallel = DataParallel(
            self.stages,
            groups,
            DataParallelSettings(
                zero_stage=config.dp_zero_stage,
                overlap_grad_reduce=config.overlap_grad_reduce,
                overlap_param_gather=config.overlap_param_gather,
                bucket_size=3000,
            ),
            memory=BucketMemory(self.device),
        )
        p2p = PipelineP2P(groups)
        p2p.warm_up(self.device, stage_to_rank)
        self.trainable = Trainable(
            groups=groups,
            split=split,
            p2p=p2p,
            message=MessageFormat(self._message_shape(split), self.dtype, self.device),
            data_parallel=data_parallel,
            optimizer=Optimizer(data_parallel, OPTIMIZER, groups, LossScale()),
            deferrable=[parameter for bucket in data_parallel.buckets for parameter in bucket.parameters],
        )

    def _num_microbatches(self, layout: Layout) -> int:
        span = self.experiment.micro_batch_size * layout.dp
        if self.experiment.global_batch_size % span:
            raise LayoutError(
                f"global_batch_size={self.experiment.global_batch_size} is not a multiple of micro_batch_size x dp = "
                f"{self.experiment.micro_batch_size} x {layout.dp}; choose another batch or another layout"
            )
        return self.experiment.global_batch_size // span

    def _message_shape(self, split: SequenceSplit) -> tuple[int, ...]:
        if self.plan.num_stages == 1:
            return ()
        samples = self.model.samples(0, self.experiment.micro_batch_size)
        length, *features = self.model.message_shape(self.model.local(samples, split))
        return (split.residual_length(length), *features)

    def run(self) -> RankTrace:
        """Run all steps and return the trace."""
        trace = RankTrace()
        data = self.trainable.data_parallel
        for step in range(self.experiment.steps):
            outcome = self._step(step, partial(trace.add_gradients, data, step))
            trace.losses.append(outcome.loss)
            trace.norms.append(outcome.grad_norm)
        trace.add_weights(data, self.stages.values())
        return trace

    def hashed(self) -> list[HashRecord]:
        """Run all steps and return their records."""
        trainable = self.trainable
        state = StateHashes(self.stages, trainable.data_parallel, trainable.optimizer, trainable.groups)
        hashed = HashedSteps(state, by_tensor=True)
        records = [hashed.initial(0)]
        for step in range(self.experiment.steps):
            outcome = self._step(step, partial(hashed.before_update, step + 1))
            records.append(hashed.after_step(outcome.loss, outcome.grad_norm))
        return records

    def _step(self, step: int, before_update: Callable[[], None]) -> StepOutcome:
        batches = self._batches(step)
        hooks = StepHooks(before_update=before_update)
        terms = torch.tensor(sum(map(self.model.count, batches)), dtype=torch.float64, device=self.device)
        work = StepWork(self.plan, partial(self._forward, batches), terms)
        return take_step(self.trainable, work, StepRates(OPTIMIZER.lr), hooks=hooks)

    def _batches(self, step: int) -> list[Batch]:
        size = self.experiment.micro_batch_size
        groups = self.trainable.groups
        first = step * self.experiment.global_batch_size + groups.index("dp") * size
        firsts = [first + micro * size * groups.size("dp") for micro in range(self.num_microbatches)]
        split = self.trainable.split
        batches = [self.model.local(self.model.samples(start, size), split) for start in firsts]
        return [{name: self._moved(tensor) for name, tensor in batch.items()} for batch in batches]

    def _moved(self, tensor: Tensor) -> Tensor:
        """Move ``tensor`` to this rank's device, and cast floating-point tensors to the tested dtype."""
        return tensor.to(self.device, self.dtype if tensor.is_floating_point() else None)

    def _forward(self, batches: list[Batch], stage: int, micro: int, hidden: Tensor | None) -> Tensor:
        return self.model.forward(self.stages[stage], batches[micro], hidden)


def _plan(layout: Layout, num_microbatches: int) -> Plan:
    schedule = layout.schedule or ("interleaved" if layout.chunks > 1 else "1f1b")
    return check_plan(
        make_plan(schedule, layout.pp, layout.num_stages // layout.pp, num_microbatches), num_microbatches
    )
