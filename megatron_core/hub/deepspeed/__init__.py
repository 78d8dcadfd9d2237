"""Read checkpoints of DeepSpeed: ZeRO 0 to 3, pipelines, and the universal format."""

from megatron_core.hub.deepspeed.checkpoint import DeepSpeedCheckpoint, read_deepspeed_checkpoint, train_state
from megatron_core.hub.deepspeed.folder import is_deepspeed_folder, latest_tag
