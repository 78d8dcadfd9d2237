"""The whole configuration of a run."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from megatron_core.config.checkpoint import CheckpointConfig
from megatron_core.config.data import DataConfig
from megatron_core.config.model import ModelConfig
from megatron_core.config.monitor import MonitorConfig
from megatron_core.config.parallel import ParallelConfig
from megatron_core.config.resilience import ResilienceConfig
from megatron_core.config.training import OptimizerConfig, TrainingConfig


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """All settings of ``pretrain_gpt.py``."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """The shape of the transformer."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """How the model and its batch are split over ranks."""
    training: TrainingConfig = field(default_factory=TrainingConfig)
    """Batches, length of training, precision."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Optimizer and learning rate."""
    data: DataConfig = field(default_factory=DataConfig)
    """Training data and the tokenizer."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Saving and loading."""
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    """Logging and checks during training."""
    resilience: ResilienceConfig = field(default_factory=ResilienceConfig)
    """Bad steps, and faults to test what a run does about them."""

    @property
    def max_positions(self) -> int:
        """Number of learned positions after defaults."""
        return self.model.max_position_embeddings or self.data.seq_length

    @property
    def schedules_by_samples(self) -> bool:
        """Whether the learning rate follows the sequences used, as in Megatron-LM with --train-samples, and not the
        steps."""
        by_samples = self.training.train_samples is not None and not self.optimizer.counts_iterations
        return by_samples or self.optimizer.counts_samples

    def flat(self) -> dict[str, Any]:
        """All settings as one ``{name: value}``, without sections."""
        sections = (getattr(self, part.name) for part in fields(self))
        return {each.name: getattr(section, each.name) for section in sections for each in fields(section)}

    @classmethod
    def from_flat(cls, values: dict[str, Any]) -> RunConfig:
        """The inverse of ``flat``; ``KeyError`` for a name that is not a setting."""
        left = dict(values)
        sections = {}
        for part in fields(cls):
            kind: Any = part.default_factory
            known = {f.name for f in fields(kind)}
            chosen = {name: left.pop(name) for name in list(left) if name in known}
            frozen = {name: tuple(v) if isinstance(v, list) else v for name, v in chosen.items()}
            sections[part.name] = kind(**frozen)
        if left:
            raise KeyError(sorted(left)[0])
        return cls(**sections)
