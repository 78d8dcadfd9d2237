"""Writes and reads sharded state dicts."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.dist_checkpointing.core import StrictHandling
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    apply_factory_merges,
    built,
    is_main_replica,
)
from megatron.core.dist_checkpointing.strategies.torch import (
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
)
from megatron_core.checkpoint import (
    CheckpointReader,
    Save,
    TensorBox,
    find_newest,
    open_newest,
    pieces_of,
    save_checkpoint,
)
from megatron_core.errors import CheckpointError
from megatron_core.hub.megatron_lm import MegatronReader
from megatron_core.parallel.current import current
from megatron_core.parallel.sharding import replicated
from megatron_core.parallel.texts import all_agree, gather_from_all_ranks
from megatron_core.training.loading import shapes_of_all

COMMON = "common"
OBJECTS = "objects"


def save(
    sharded_state_dict: dict[str, Any],
    checkpoint_dir: str | Path,
    sharded_strategy: Any = None,
    common_strategy: Any = None,
    validate_access_integrity: bool = True,
    async_sharded_save: bool = False,
    preprocess_common_before_consistancy_check: Callable[..., Any] | None = None,
    content_metadata: dict[str, Any] | None = None,
    verify_integrity: bool = True,
    *,
    iteration: int = 0,
) -> None:
    """Write a nested dict of ``ShardedTensor``, tensors and JSON values; a collective call.

    A ``ShardedTensor`` is a part of the global tensor of its key, the main replica writes each ``ShardedObject``, and
    rank 0 writes all other values; factories are stored as the result of ``build``. The folder has the layout of this
    package's checkpoints, with the number ``iteration``, and always the hash of each file. Raises CheckpointError for
    values of other kinds, for a part that no rank or two ranks wrote, and if a rank failed.
    """
    _refuse(common_strategy=common_strategy, async_sharded_save=async_sharded_save)
    if not isinstance(sharded_strategy, TorchDistSaveShardedStrategy | None):
        _refuse(sharded_strategy=sharded_strategy)
    items = list(_walk(built(sharded_state_dict), ()))
    pieces = [piece for path, value in items for piece in _pieces(path, value)]
    common = {".".join(path): value for path, value in items if not isinstance(value, _LEAVES)}
    objects = {v.unique_key: v.data for _, v in items if isinstance(v, ShardedObject) and is_main_replica(v.replica_id)}
    try:
        json.dumps(common)
        texts = gather_from_all_ranks(json.dumps(objects), _device())
    except TypeError as error:
        raise CheckpointError(f"a sharded state dict may contain only tensors and JSON values: {error}") from error
    everywhere = {key: value for text in texts for key, value in json.loads(text).items()}
    state = {COMMON: common, OBJECTS: everywhere, "content_metadata": content_metadata}
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    save_checkpoint(
        Save(Path(checkpoint_dir), iteration, state, rank=current().rank, ranks=ranks),
        pieces,
        partial(all_agree, device=_device()),
    )


def load(
    sharded_state_dict: dict[str, Any],
    checkpoint_dir: str | Path,
    sharded_strategy: Any = None,
    common_strategy: Any = None,
    validate_access_integrity: bool = True,
    strict: Any = None,
    verify_integrity: bool = True,
) -> dict[str, Any]:
    """Return the same nested dict with loaded values; tensors in it are filled in place. A collective call.

    If ``save`` had ``content_metadata``, the result has them under this key, for ``load_content_metadata``.
    All ranks always compare the hashes of the files first. Loading is always strict: CheckpointError for a tensor that
    is not stored or has another shape.
    """
    _refuse(common_strategy=common_strategy)
    if not isinstance(sharded_strategy, TorchDistLoadShardedStrategy | None):
        _refuse(sharded_strategy=sharded_strategy)
    stored = open_newest(str(checkpoint_dir), None, device=_device())
    if stored is None:
        raise CheckpointError(_absent(checkpoint_dir))
    metadata = stored.state.get("content_metadata") if isinstance(stored, CheckpointReader) else None
    loaded = load_from(stored, sharded_state_dict)
    return loaded if metadata is None else loaded | {"content_metadata": metadata}


def load_from(stored: CheckpointReader | MegatronReader, sharded_state_dict: dict[str, Any]) -> dict[str, Any]:
    """Load from an open checkpoint and close it; see ``load``."""
    parts = built(sharded_state_dict)
    with stored as reader:
        pieces = [piece for path, value in _walk(parts, ()) for piece in _pieces(path, value)]
        if isinstance(reader, MegatronReader):
            reader.check_names(shapes_of_all(pieces, _device()))
        reader.fill(pieces)
        filled = _filled(parts, (), reader.state.get(COMMON, {}) | reader.state.get(OBJECTS, {}))
        return dict(apply_factory_merges(filled, sharded_state_dict))


def get_default_save_sharded_strategy(backend: str = "torch_dist", version: int = 1) -> TorchDistSaveShardedStrategy:
    """Return the only strategy of ``save``."""
    return TorchDistSaveShardedStrategy(backend, version)


def get_default_load_sharded_strategy(checkpoint_dir: str | Path | None = None) -> TorchDistLoadShardedStrategy:
    """Return the only strategy of ``load``."""
    return TorchDistLoadShardedStrategy()


def load_common_state_dict(checkpoint_dir: str | Path) -> dict[str, Any]:
    """Return the values that are not sharded; their names are the keys joined by dots."""
    with CheckpointReader(_folder(checkpoint_dir)) as reader:
        return dict(reader.state.get(COMMON, {}))


def load_plain_tensors(checkpoint_dir: str | Path) -> dict[str, Tensor]:
    """Return every sharded tensor as a whole, by its key."""
    with CheckpointReader(_folder(checkpoint_dir)) as reader:
        return {key: reader.read(name) for key, name in _sharded_names(reader).items()}


def load_tensors_metadata(checkpoint_dir: str | Path) -> dict[str, ShardedTensor]:
    """Return every sharded tensor as one part on the meta device, by its key."""
    with CheckpointReader(_folder(checkpoint_dir)) as reader:
        shapes = {
            key: torch.empty(reader.manifest.tensors[name].shape, dtype=reader.dtype_of(name), device="meta")
            for key, name in _sharded_names(reader).items()
        }
    return {key: ShardedTensor.from_rank_offsets(key, data) for key, data in shapes.items()}


def load_content_metadata(
    checkpoint_dir: str | Path | None = None, *, preloaded_state_dict: dict[str, Any] | None = None
) -> dict[str, Any] | None:
    """Return the ``content_metadata`` of ``save``; None without it. ``preloaded_state_dict`` may have it."""
    if preloaded_state_dict is not None:
        return preloaded_state_dict.get("content_metadata")
    if checkpoint_dir is None:
        raise CheckpointError("load_content_metadata needs checkpoint_dir or preloaded_state_dict; pass one of them")
    with CheckpointReader(_folder(checkpoint_dir)) as reader:
        return reader.state.get("content_metadata")


def remove_sharded_tensors(checkpoint_dir: str, key_prefix: str) -> None:
    """Raise CheckpointError: files of a checkpoint never change."""
    raise CheckpointError("remove_sharded_tensors is not supported; load the tensors to keep and save them again")


def _sharded_names(reader: CheckpointReader) -> dict[str, str]:
    """Return the stored name of each sharded tensor by its key."""
    names = [name for name in reader.manifest.tensors if not name.startswith(f"{COMMON}.")]
    return {name.removeprefix("model."): name for name in names}


def _folder(checkpoint_dir: str | Path) -> Path:
    folder = find_newest(str(checkpoint_dir), None)
    if folder is None:
        raise CheckpointError(_absent(checkpoint_dir))
    return folder


def _absent(checkpoint_dir: str | Path) -> str:
    return f"{checkpoint_dir} has no complete checkpoint; pass the folder that was passed to save"


def _refuse(**given: Any) -> None:
    wrong = [name for name, value in given.items() if value]
    if wrong:
        raise CheckpointError(f"dist_checkpointing: {', '.join(wrong)} is not supported; remove it")


def _walk(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the leaves of nested dicts, and of lists that contain tensors or objects at any depth."""
    if isinstance(value, dict) or _holds_leaves(value):
        for name, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _walk(item, (*path, str(name)))
    else:
        yield path, value


_LEAVES = ShardedTensor | Tensor | LocalNonpersistentObject | ShardedObject


def _holds_leaves(value: Any) -> bool:
    """Whether a list is more than a JSON value."""
    if not isinstance(value, list | tuple):
        return False
    return any(isinstance(leaf, _LEAVES) for leaf in _nested(value))


def _nested(value: Any) -> Iterator[Any]:
    """Yield all values in nested dicts, lists and tuples."""
    if isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _nested(item)
    else:
        yield value


def _pieces(path: tuple[str, ...], value: Any) -> Iterator[TensorBox]:
    """Yield a tensor as boxes of a global tensor, as in this package's checkpoints."""
    groups = current()
    if isinstance(value, ShardedTensor):
        shape, first, stop = value.flattened or (value.local_shape, 0, value.data.numel())
        writes = value.is_main_replica
        if value.flattened is None:  # the first data-parallel rank writes equal copies
            writes = writes and groups.group("-".join(value.spec.replica_axes)).rank() == 0
        name = value.key if value.key.startswith("optimizer.") else f"model.{value.key}"
        for piece in pieces_of(name, value.spec, shape, first, stop, value.data.reshape(-1)):
            yield piece if writes else replace(piece, owned=False)
    elif isinstance(value, Tensor):
        spec, flat = replicated(tuple(value.shape)), value.detach().reshape(-1)
        for piece in pieces_of(f"{COMMON}.{'.'.join(path)}", spec, tuple(value.shape), 0, value.numel(), flat):
            yield replace(piece, owned=groups.rank == 0)


def _filled(value: Any, path: tuple[str, ...], common: dict[str, Any]) -> Any:
    if isinstance(value, dict):
        return {name: _filled(item, (*path, str(name)), common) for name, item in value.items()}
    if _holds_leaves(value):
        return [_filled(item, (*path, str(i)), common) for i, item in enumerate(value)]
    if isinstance(value, ShardedTensor):
        return value.data.view(value.local_shape[value.prepended :])
    if isinstance(value, LocalNonpersistentObject):
        return value.unwrap()
    if isinstance(value, ShardedObject):
        if value.unique_key not in common:
            raise CheckpointError(f"the checkpoint has no object {value.unique_key}")
        return common[value.unique_key]
    return value if isinstance(value, Tensor) else common.get(".".join(path), value)


def _device() -> torch.device:
    on_gpu = dist.is_initialized() and dist.get_backend() == "nccl"
    return torch.device(torch.cuda.current_device()) if on_gpu else torch.device("cpu")
