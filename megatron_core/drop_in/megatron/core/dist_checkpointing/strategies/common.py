"""Megatron Core's file of values that are not sharded, which is not supported."""

from megatron.core.unsupported import unsupported

_MESSAGE = "checkpoints of this package have no common.pt; use dist_checkpointing.load_common_state_dict"
load_common = unsupported(_MESSAGE)
save_common = unsupported(_MESSAGE)
