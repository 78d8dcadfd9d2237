"""Not available: monitors."""

from deepspeed.unavailable import refuse

refuse("deepspeed.monitor", "set metrics_file, tensorboard_dir or wandb_project (docs/monitoring.md)")
