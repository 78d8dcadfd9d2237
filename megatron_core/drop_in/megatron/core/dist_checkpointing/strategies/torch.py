"""The strategies that their calls of ``save`` and ``load`` name."""


class TorchDistSaveShardedStrategy:
    """Accepted by ``dist_checkpointing.save``, which writes this package's checkpoints with or without it."""

    def __init__(self, backend: str = "torch_dist", version: int = 1) -> None:
        self.backend, self.version = backend, version


class TorchDistLoadShardedStrategy(TorchDistSaveShardedStrategy):
    """Accepted by ``dist_checkpointing.load``, which reads this package's checkpoints with or without it."""
