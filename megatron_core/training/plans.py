"""Sizes of a run's steps, and their pipeline plans: one for each number of micro-batches."""

from dataclasses import dataclass
from functools import cache

from megatron_core.config import RunConfig
from megatron_core.config.partition import plan_of
from megatron_core.schedules import forward_only
from megatron_core.schedules.actions import Plan
from megatron_core.schedules.checks import check_plan


@dataclass(frozen=True)
class StepSize:
    """Samples and tokens of a step, as functions of the number of samples consumed before it."""

    consumed_samples: int
    batch_size: int
    """Sequences in the global batch."""
    num_microbatches: int
    """Micro-batches of each rank."""
    sequence_length: int
    """Tokens of each sequence."""

    @classmethod
    def at(cls, config: RunConfig, data_parallel_size: int, consumed_samples: int) -> "StepSize":
        """The step of a training that follows ``consumed_samples``."""
        batch = config.training.batch_growth(data_parallel_size, config.data.seq_length).at(consumed_samples)
        length = config.data.length_growth.at(consumed_samples)
        return cls(consumed_samples, batch, batch // (config.training.micro_batch_size * data_parallel_size), length)

    @classmethod
    def of_evaluation(cls, config: RunConfig, data_parallel_size: int) -> "StepSize":
        """The first batch of an evaluation; all evaluation batches have full size, so that results are comparable.

        Each outer group evaluates the whole batch."""
        batch = config.training.evaluation_batch_size(data_parallel_size)
        micro = batch * config.num_groups // (config.training.micro_batch_size * data_parallel_size)
        return cls(0, batch, micro, config.data.seq_length)

    @property
    def end(self) -> int:
        """Samples consumed after it."""
        return self.consumed_samples + self.batch_size

    @property
    def tokens(self) -> int:
        """Tokens in the global batch."""
        return self.batch_size * self.sequence_length


class Plans:
    """Plans by the number of micro-batches of a rank, each built and checked at first use.

    The largest plan, for the full global batch, is built in the constructor, so that an invalid schedule is an error
    before anything else is built. All plans place stages on the same ranks: ``stage_to_rank`` maps stages to ranks.
    """

    def __init__(self, config: RunConfig, data_parallel_size: int) -> None:
        self._config = config
        self.training, self.evaluation = cache(self._training), cache(self._evaluation)
        batch = config.training.final_batch_size(data_parallel_size)
        largest = self.training(batch // (config.training.micro_batch_size * data_parallel_size))
        self.stage_to_rank = largest.stage_to_rank
        self.ends = self.stage_to_rank[0], self.stage_to_rank[-1]
        """Pipeline ranks of the first and the last stage."""

    def _training(self, num_microbatches: int) -> Plan:
        """The plan of a training step."""
        return plan_of(self._config, num_microbatches)

    def _evaluation(self, num_microbatches: int) -> Plan:
        """The plan of an evaluation batch."""
        ranks = self._config.parallel.pipeline_model_parallel_size
        chunks = len(self.stage_to_rank) // ranks
        # Schedules of training order backwards, too; an evaluation needs only the same stages on the same ranks.
        plan = forward_only(ranks, chunks, num_microbatches, stage_to_rank=self.stage_to_rank)
        return check_plan(plan, num_microbatches, forward_only=True)
