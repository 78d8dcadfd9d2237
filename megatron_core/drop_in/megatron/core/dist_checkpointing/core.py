"""The error, the format and the keys of checkpoints, and tensors of the caller's modules."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedStateDict, ShardedTensor
from megatron_core.checkpoint import find_checkpoint
from megatron_core.errors import CheckpointError, ConfigError
from megatron_core.foreign_json import COUNT, STRING, read_object
from megatron_core.parallel.current import current
from megatron_core.parallel.groups import Group

CheckpointingException = CheckpointError


def check_is_distributed_checkpoint(checkpoint_dir: str | Path) -> bool:
    """Whether the folder has a complete checkpoint of this package."""
    return find_checkpoint(str(checkpoint_dir)) is not None


CONFIG_FNAME = "metadata.json"


@dataclass
class CheckpointingConfig:
    """The format of a checkpoint, as Megatron Core stores it in ``metadata.json``."""

    sharded_backend: str
    sharded_backend_version: int = 1
    common_backend: str = "torch"
    common_backend_version: int = 1


TYPES = {"sharded_backend": STRING, "common_backend": STRING}
TYPES |= {"sharded_backend_version": COUNT, "common_backend_version": COUNT}


def maybe_load_config(checkpoint_dir: str | Path) -> CheckpointingConfig | None:
    """Return the format of a checkpoint of Megatron Core; None without ``metadata.json``.

    Errors: ``CheckpointError`` for a file without a format, or with values of another type.
    """
    path = Path(checkpoint_dir) / CONFIG_FNAME
    if not path.is_file():
        return None
    content = read_object(path, CheckpointError, "copy the whole checkpoint again", TYPES)
    if content.get("sharded_backend") is None:
        raise CheckpointError(f"{path} has no sharded_backend; copy the whole checkpoint again")
    return CheckpointingConfig(**{name: content[name] for name in TYPES if content.get(name) is not None})


def save_config(config: CheckpointingConfig, checkpoint_dir: str | Path) -> None:
    """Write ``metadata.json``."""
    (Path(checkpoint_dir) / CONFIG_FNAME).write_text(json.dumps(asdict(config)))


class StrictHandling(Enum):
    """Megatron's rules; ``load`` of this package is always strict about keys that the checkpoint lacks."""

    ASSUME_OK_UNEXPECTED = "assume_ok_unexpected"
    LOG_UNEXPECTED = "log_unexpected"
    LOG_ALL = "log_all"
    RAISE_UNEXPECTED = "raise_unexpected"
    RAISE_ALL = "raise_all"
    RETURN_UNEXPECTED = "return_unexpected"
    RETURN_ALL = "return_all"
    IGNORE_ALL = "ignore_all"

    @staticmethod
    def requires_explicit_ckpt_mismatch_check(val: "StrictHandling") -> bool:
        """Whether keys are compared before the checkpoint is read."""
        return val is not StrictHandling.ASSUME_OK_UNEXPECTED

    @staticmethod
    def requires_global_app_metadata(val: "StrictHandling") -> bool:
        """Whether the keys of all ranks are compared."""
        return val.value.endswith("_all")

    @staticmethod
    def requires_returning_mismatch_keys(val: "StrictHandling") -> bool:
        """Whether ``load`` returns the keys."""
        return val.value.startswith("return_")


def parse_strict_flag(strict: str | StrictHandling) -> StrictHandling:
    """Return the rule of a name; ValueError for an unknown name."""
    try:
        return StrictHandling(strict)
    except ValueError:
        legal = ", ".join(each.value for each in StrictHandling)
        raise ValueError(f"Invalid strict flag {strict!r}; legal: {legal}") from None


def verify_checkpoint(checkpoint_dir: str | Path) -> None:
    """Raise CheckpointError unless the folder has a complete checkpoint of this package."""
    if not Path(checkpoint_dir).is_dir():
        raise CheckpointingException(f"Checkpoint directory {checkpoint_dir} does not exist; pass that of save")
    if not check_is_distributed_checkpoint(checkpoint_dir):
        raise CheckpointingException(f"{checkpoint_dir} is not a distributed checkpoint; pass the folder of save")


def _keyed(state_dict: ShardedStateDict) -> Iterator[ShardedBase]:
    return (leaf for leaf in nested_values(state_dict) if isinstance(leaf, ShardedBase))


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


def make_tp_sharded_tensor_for_checkpoint(
    tensor: Tensor,
    key: str,
    tp_axis: int = 0,
    replica_id: Any = None,
    prepend_offsets: tuple[Any, ...] = (),
    allow_shape_mismatch: bool = False,
    tp_group: Group | None = None,
    dp_cp_group: Group | None = None,
) -> ShardedTensor:
    """Return a tensor that is split evenly along ``tp_axis`` over the tensor-parallel ranks."""
    tp, dp = _groups(prepend_offsets, tp_group, dp_cp_group)
    part = (tp_axis, tp.rank(), tp.size())
    copy = (0, dp.rank()) if replica_id is None else replica_id
    found = ShardedTensor.from_rank_offsets(key, tensor, part, replica_id=copy)
    found.allow_shape_mismatch = allow_shape_mismatch
    return found


def make_sharded_tensor_for_checkpoint(
    tensor: Tensor,
    key: str,
    prepend_offsets: tuple[Any, ...] = (),
    replica_id: Any = None,
    tp_group: Group | None = None,
    dp_cp_group: Group | None = None,
) -> ShardedTensor:
    """Return a tensor that is whole on every rank."""
    tp, dp = _groups(prepend_offsets, tp_group, dp_cp_group)
    copy = (tp.rank(), dp.rank()) if replica_id is None else replica_id
    return ShardedTensor.from_rank_offsets(key, tensor, replica_id=copy)


def _groups(offsets: tuple[Any, ...], tp: Group | None, dp: Group | None) -> tuple[Group, Group]:
    """Return the given groups, or those of the current layout; ConfigError for prepended offsets."""
    if offsets:
        raise ConfigError(f"prepend_offsets={offsets} is not supported; give every layer its own name")
    return tp or current().group("tp"), dp or current().group("dp-cp")


def _clean_metadata_for_serialization(metadata: dict[str, Any]) -> dict[str, Any]:
    """Return the entries without process groups, which cannot be stored."""
    return {name: value for name, value in metadata.items() if name != "dp_cp_group"}
