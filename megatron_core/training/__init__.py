"""Setting up a run, its steps and its loop."""

from megatron_core.training.pretrain import pretrain, read_settings

__all__ = ["pretrain", "read_settings"]
