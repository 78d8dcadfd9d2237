"""Changes the keys of a sharded state dict."""

from collections.abc import Iterator
from typing import Any

from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron_core.errors import CheckpointError


def _keyed(value: Any) -> Iterator[ShardedTensor | ShardedObject | ShardedTensorFactory]:
    if isinstance(value, ShardedTensor | ShardedObject | ShardedTensorFactory):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _keyed(item)


def add_prefix_for_sharding(sharded_state_dict: ShardedStateDict, prefix: str) -> None:
    """Put ``prefix`` before every key, in place."""
    replace_prefix_for_sharding(sharded_state_dict, "", prefix)


def replace_prefix_for_sharding(sharded_state_dict: ShardedStateDict, old_prefix: str, new_prefix: str) -> None:
    """Replace the prefix of every key, in place; raises CheckpointError before any change if a key lacks it."""
    found = list(_keyed(sharded_state_dict))
    if others := [each.key for each in found if not each.key.startswith(old_prefix)]:
        raise CheckpointError(f"the key {others[0]} does not begin with old_prefix={old_prefix!r}")
    for each in found:
        each.key = new_prefix + each.key.removeprefix(old_prefix)


def apply_prefix_mapping(sharded_state_dict: ShardedStateDict, prefix_map: dict[str, str]) -> None:
    """Replace the first matching prefix of ``prefix_map`` in every key by its value, in place."""
    for each in _keyed(sharded_state_dict):
        old = next((prefix for prefix in prefix_map if each.key.startswith(prefix)), "")
        each.key = prefix_map.get(old, "") + each.key.removeprefix(old)
