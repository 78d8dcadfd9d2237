"""Sections of batches, evaluation, schedules, checkpoints, tokenizer and logs."""

from dataclasses import dataclass

from megatron.core.mirror import mirror


@dataclass(kw_only=True)
class TrainingConfig(mirror("TrainingConfig", kw_only=True)):  # type: ignore[misc]
    """Batches and the length of training."""

    step_batch_size_schedule: str | None = None


class ValidationConfig(mirror("ValidationConfig", kw_only=True)):  # type: ignore[misc]
    """Evaluation."""


class SchedulerConfig(mirror("SchedulerConfig", kw_only=True)):  # type: ignore[misc]
    """Schedules of learning rate and weight decay."""


class CheckpointConfig(mirror("CheckpointConfig", kw_only=True)):  # type: ignore[misc]
    """Saving and loading; ``save_rng``, ``load_rng`` and ``fully_parallel_...`` have no effect."""


class TokenizerConfig(mirror("TokenizerConfig", kw_only=True)):  # type: ignore[misc]
    """The tokenizer."""


class LoggerConfig(mirror("LoggerConfig", kw_only=True)):  # type: ignore[misc]
    """Logs and their destinations."""
