"""Not available: Nebula checkpoints."""

from deepspeed.unavailable import refuse

refuse("deepspeed.nebula", "checkpoints are written by engine.save_checkpoint")
