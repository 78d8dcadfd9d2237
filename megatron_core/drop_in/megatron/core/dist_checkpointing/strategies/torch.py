"""Strategies that programs pass to ``save`` and ``load``."""


class TorchDistSaveShardedStrategy:
    """A strategy without effect: ``dist_checkpointing.save`` always writes checkpoints of this package."""

    def __init__(self, backend: str = "torch_dist", version: int = 1) -> None:
        self.backend, self.version = backend, version


class TorchDistLoadShardedStrategy(TorchDistSaveShardedStrategy):
    """A strategy without effect: ``dist_checkpointing.load`` always reads checkpoints of this package."""
