"""A model of one's own under proof: any modules that are built from the parallel layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron_core import parallel_state
from megatron_core.config import OptimizerConfig, RunConfig
from megatron_core.config.layout import Layout
from megatron_core.data_parallel import DataParallel
from megatron_core.errors import LayoutError
from megatron_core.optimizer.loss_scale import ConstantLossScale
from megatron_core.optimizer.optimizer import Optimizer
from megatron_core.parallel import ParallelGroups
from megatron_core.parallel.collectives import all_reduce_
from megatron_core.pipeline_parallel.actions import Plan
from megatron_core.pipeline_parallel.checks import check
from megatron_core.pipeline_parallel.executor import Executor, Listener, MessageFormat
from megatron_core.pipeline_parallel.p2p import Links
from megatron_core.pipeline_parallel.schedules import make_plan
from megatron_core.tensor_parallel import ModelParallelConfig
from megatron_core.verify.ranks import this_world
from megatron_core.verify.record import Record

Batch = Mapping[str, Tensor]


class Subject(ABC):
    """A model and its data, as a proof needs them.

    Initial weights must be functions of the parameters' names (``parallel.sharding.initialise_by_name``), and batches
    of the samples' numbers: nothing may depend on the layout. Parameters of a stage are known by ``named_parameters``,
    or by ``named_global_parameters`` where a stage has one; names must not depend on the stage.
    """

    @abstractmethod
    def build(self, stage: int, num_stages: int, groups: ParallelGroups, options: ModelParallelConfig) -> nn.Module:
        """Stage ``stage`` of ``num_stages``; ``options`` have dtype, device and sequence parallelism."""

    @abstractmethod
    def samples(self, first: int, count: int) -> Batch:
        """The global samples ``first ... first + count - 1`` as one micro-batch on the CPU.

        Floating tensors are cast to the dtype under proof.
        """

    @abstractmethod
    def count(self, batch: Batch) -> float:
        """How many terms the sum of the losses of ``batch`` has."""

    @abstractmethod
    def forward(self, module: nn.Module, batch: Batch, hidden: Tensor | None) -> Tensor:
        """Run a stage: the sum of the losses on the last one, what the next one receives on the others."""

    def message_shape(self, batch: Batch) -> tuple[int, ...]:
        """Shape of what goes from stage to stage, before sequence parallelism splits its first dimension."""
        raise LayoutError(f"{type(self).__name__} defines no message_shape, so that it cannot be split over a pipeline")


@dataclass(frozen=True)
class ModuleExperiment:
    """Trains ``subject`` for ``steps`` steps under any layout, with this project's data parallelism and AdamW."""

    subject: Subject
    steps: int = 3
    global_batch_size: int = 8
    micro_batch_size: int = 1

    def __call__(self, layout: Layout, dtype: str) -> Record:
        """This rank's record; called in every rank of a world of ``layout.world_size``."""
        return _Training(self, layout, dtype).run()


OPTIMIZER = OptimizerConfig(lr=1e-3, adam_eps=1e-3, clip_grad=0.5)
"""As for a GPT that was shrunk, and for the same reasons: ``verify.shrink``."""


class _Training:
    """One rank's training."""

    def __init__(self, experiment: ModuleExperiment, layout: Layout, dtype: str) -> None:
        self.experiment, self.subject = experiment, experiment.subject
        world = this_world()
        config = RunConfig.from_flat(layout.settings()).parallel
        self.device, self.dtype = world.device, getattr(torch, dtype)
        self.num_microbatches = self._num_microbatches(layout)
        self.plan = _plan(layout, self.num_microbatches)
        self.place = self.plan.place
        self.groups = parallel_state.make_groups(config, world, ends=(self.place[0], self.place[-1]))
        self.sequence_parallel = layout.sequence_parallel
        options = ModelParallelConfig(
            sequence_parallel=layout.sequence_parallel, params_dtype=self.dtype, device=self.device
        )
        self.stages = {
            stage: self.subject.build(stage, len(self.place), self.groups, options)
            for stage, rank in enumerate(self.place)
            if rank == self.groups.index("pp")
        }
        self.data_parallel = DataParallel(
            self.stages,
            self.groups,
            sharded=config.use_distributed_optimizer,
            overlap_grad_reduce=config.overlap_grad_reduce,
            overlap_param_gather=config.overlap_param_gather,
            bucket_size=3000,
            device=self.device,
        )
        self.optimizer = Optimizer(self.data_parallel, OPTIMIZER, self.groups, ConstantLossScale(1.0))
        self.links = Links(self.groups)
        self.links.connect(self.device, self.place)

    def _num_microbatches(self, layout: Layout) -> int:
        span = self.experiment.micro_batch_size * layout.dp
        if self.experiment.global_batch_size % span:
            raise LayoutError(
                f"global_batch_size={self.experiment.global_batch_size} is not a multiple of micro_batch_size x dp = "
                f"{self.experiment.micro_batch_size} x {layout.dp}; choose another batch or another layout"
            )
        return self.experiment.global_batch_size // span

    def run(self) -> Record:
        """All steps."""
        record = Record()
        for step in range(self.experiment.steps):
            batches = self._batches(step)
            terms = self._summed(sum(self.subject.count(batch) for batch in batches), "dp-cp")
            self.data_parallel.zero_grad()
            losses = self._run_plan(batches, 1.0 / max(terms, 1.0))
            self.data_parallel.finish()
            record.add_gradients(self.data_parallel, step)
            record.norms.append(self.optimizer.step(OPTIMIZER.lr).grad_norm)
            self.data_parallel.gather_weights()
            counts = self.groups.index("tp") == 0
            record.losses.append(self._summed(counts * sum(losses.values()), "tp-cp-ep-dp-pp"))
        self.data_parallel.finish_gather()
        record.add_weights(self.stages.values())
        return record

    def _batches(self, step: int) -> list[Batch]:
        size, dp = self.experiment.micro_batch_size, self.groups.size("dp")
        first = step * self.experiment.global_batch_size + self.groups.index("dp") * size
        batches = [self.subject.samples(first + micro * size * dp, size) for micro in range(self.num_microbatches)]
        return [{name: self._moved(tensor) for name, tensor in batch.items()} for batch in batches]

    def _moved(self, tensor: Tensor) -> Tensor:
        """On this rank's device, and in the dtype under proof if it is a floating one."""
        return tensor.to(self.device, self.dtype if tensor.is_floating_point() else None)

    def _run_plan(self, batches: list[Batch], factor: float) -> dict[int, float]:
        last = len(self.place) - 1

        def forward(stage: int, micro: int, hidden: Tensor | None) -> Tensor:
            output = self.subject.forward(self.stages[stage], batches[micro], hidden)
            return output * factor if stage == last else output

        message = MessageFormat(self._message_shape(batches[0]), self.dtype, self.device)
        data = self.data_parallel
        executor = Executor(
            self.plan,
            self.links,
            message,
            forward,
            parameters=[parameter for bucket in data.buckets for parameter in bucket.parameters],
            listener=Listener(on_last_backward=data.arm, on_last_weights=data.reduce_early),
        )
        return {micro: loss.item() for micro, loss in executor.run().items()}

    def _message_shape(self, batch: Batch) -> tuple[int, ...]:
        if len(self.place) == 1:
            return ()
        length, *rest = self.subject.message_shape(batch)
        return (length // self.groups.size("tp") if self.sequence_parallel else length, *rest)

    def _summed(self, value: float, axes: str) -> float:
        total = torch.tensor(float(value), dtype=torch.float64, device=self.device)
        all_reduce_(total, self.groups.group(axes))
        return total.item()


def _plan(layout: Layout, num_microbatches: int) -> Plan:
    schedule = layout.schedule or ("interleaved" if layout.chunks > 1 else "1f1b")
    return check(make_plan(schedule, layout.pp, layout.num_stages // layout.pp, num_microbatches), num_microbatches)
