"""``megatron.core.ranks`` at Megatron's path."""

from megatron.core.ranks import log_single_rank, safe_get_rank, safe_get_world_size
