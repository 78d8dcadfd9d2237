"""How large a step is, which may grow in the course of a training."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_core.config import RunConfig


@dataclass(frozen=True)
class StepSize:
    """A step's place in the data and its extents, as functions of the samples consumed before it."""

    consumed_samples: int
    batch_size: int
    """Sequences of all ranks together."""
    num_microbatches: int
    """Micro-batches of each rank."""
    sequence_length: int
    """Tokens of each sequence."""

    @classmethod
    def at(cls, config: RunConfig, data_parallel_size: int, consumed_samples: int) -> StepSize:
        """The step of a training that follows ``consumed_samples``."""
        batch = config.training.batch_ramp(data_parallel_size).at(consumed_samples)
        length = config.data.length_ramp.at(consumed_samples)
        return cls(consumed_samples, batch, batch // (config.training.micro_batch_size * data_parallel_size), length)

    @classmethod
    def of_evaluation(cls, config: RunConfig, data_parallel_size: int) -> StepSize:
        """The first batch of an evaluation: all of them have full size, so that evaluations can be compared."""
        batch = config.training.final_batch_size(data_parallel_size)
        micro = batch // (config.training.micro_batch_size * data_parallel_size)
        return cls(0, batch, micro, config.data.seq_length)

    @property
    def end(self) -> int:
        """Samples consumed after it."""
        return self.consumed_samples + self.batch_size

    @property
    def tokens(self) -> int:
        """Tokens of all ranks together."""
        return self.batch_size * self.sequence_length
