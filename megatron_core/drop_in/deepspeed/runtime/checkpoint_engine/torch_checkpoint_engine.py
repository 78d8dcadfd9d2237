"""``TorchCheckpointEngine``, whose construction is refused."""

from deepspeed.unavailable import refused

TorchCheckpointEngine = refused(
    "deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine.TorchCheckpointEngine",
    "use save_checkpoint and load_checkpoint of the engine (docs/checkpoints.md)",
)
