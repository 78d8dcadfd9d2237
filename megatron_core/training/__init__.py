"""Setting up a run, its steps and its loop."""

from megatron_core.training.pretrain import pretrain

__all__ = ["pretrain"]
