"""For Megatron Core's users: sharded state dicts as checkpoints of this package, which every layout reads."""

from megatron_core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron_core.dist_checkpointing.serialization import load, load_common_state_dict, save
