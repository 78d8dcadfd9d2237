"""For Megatron Core's users: what a sharded state dict consists of."""

from typing import Any

from megatron_core.parallel.sharded_tensor import ShardedTensor

__all__ = ["LocalNonpersistentObject", "ShardedStateDict", "ShardedTensor", "is_main_replica"]

ShardedStateDict = dict[str, Any]


class LocalNonpersistentObject:
    """An object that is not saved; loading puts it back as it is."""

    def __init__(self, obj: Any) -> None:
        self.obj = obj

    def unwrap(self) -> Any:
        """The object."""
        return self.obj


def is_main_replica(replica_id: int | tuple[int, ...]) -> bool:
    """Whether the number, or all of several, is 0."""
    return not any(replica_id) if isinstance(replica_id, tuple) else replica_id == 0
