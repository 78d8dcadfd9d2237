"""The whole configuration of a run."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

from megatron_core.config.checkpoint import CheckpointConfig
from megatron_core.config.data import DataConfig
from megatron_core.config.model import ModelConfig
from megatron_core.config.monitor import MonitorConfig
from megatron_core.config.parallel import ParallelConfig
from megatron_core.config.training import OptimizerConfig, TrainingConfig


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that ``pretrain_gpt.py`` is told."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """The shape of the transformer."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """How the work is split over ranks."""
    training: TrainingConfig = field(default_factory=TrainingConfig)
    """Batches, length of training, precision."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Optimizer and learning rate."""
    data: DataConfig = field(default_factory=DataConfig)
    """Where the tokens come from."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Saving and loading."""
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    """What the run says about itself."""

    @property
    def max_positions(self) -> int:
        """Rows of the position table after defaults."""
        return self.model.max_position_embeddings or self.data.seq_length

    def flat(self) -> dict[str, Any]:
        """One flat ``{flag_name: value}``, as ``--config`` files have it."""
        return {name: value for section in asdict(self).values() for name, value in section.items()}

    @classmethod
    def from_flat(cls, values: dict[str, Any]) -> RunConfig:
        """The inverse of ``flat``; names that no section has are a ``KeyError``."""
        left = dict(values)
        sections = {}
        for part in fields(cls):
            kind = part.default_factory  # type: ignore[misc]
            known = {f.name for f in fields(kind)}  # type: ignore[arg-type]
            chosen = {name: left.pop(name) for name in list(left) if name in known}
            frozen = {name: tuple(v) if isinstance(v, list) else v for name, v in chosen.items()}
            sections[part.name] = kind(**frozen)  # type: ignore[misc]
        if left:
            raise KeyError(sorted(left)[0])
        return cls(**sections)
