"""Attention masks and windows, GELU variants, and settings of a built model."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.dist_checkpointing.core import (
    make_sharded_tensor_for_checkpoint,
    make_tp_sharded_tensor_for_checkpoint,
)
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.transformer.module import sharded
from megatron_core import parallel_state
from megatron_core.errors import ConfigError
from megatron_core.parallel.current import current
from megatron_core.parallel.groups import Group


def attention_mask_func(attention_scores: Tensor, attention_mask: Tensor) -> Tensor:
    """Set scores to -10,000 where the mask is True, in place."""
    return attention_scores.masked_fill_(attention_mask, -10000.0)


def get_default_causal_mask(sq: int) -> Tensor:
    """Return ``[sq, sq]``, True if a key comes after the query, on the current GPU if there is one."""
    return torch.ones(sq, sq, dtype=torch.bool, device=_device()).triu(1)


def get_sliding_window_causal_mask(sq: int, skv: int, window_size: tuple[int, int]) -> Tensor:
    """Return ``[sq, skv]``, False for keys from ``window_size[0]`` before a query to ``window_size[1]`` after it.

    The last query has the position of the last key.
    """
    own, (left, right) = skv - sq, window_size
    seen = torch.ones(sq, skv, dtype=torch.bool, device=_device())
    return ~seen.triu(own - left).tril(own + right)


def openai_gelu(x: Tensor) -> Tensor:
    """GELU in the tanh approximation, as an ``activation_func``."""
    return nn.functional.gelu(x, approximate="tanh")


def erf_gelu(x: Tensor) -> Tensor:
    """The exact GELU."""
    return nn.functional.gelu(x)


def is_layer_window_attention(
    window_size: tuple[int, int] | None, window_attn_skip_freq: int | Sequence[int] | None, layer_number: int
) -> bool:
    """Whether a layer, numbered from 1, uses a window: all but every n-th layer, or as listed."""
    if not window_size:
        return False
    if window_attn_skip_freq is None:
        return True
    if isinstance(window_attn_skip_freq, int):
        return layer_number % window_attn_skip_freq != 0
    if isinstance(window_attn_skip_freq, list | tuple):
        return bool(window_attn_skip_freq[layer_number - 1])
    kind = type(window_attn_skip_freq).__name__
    raise ConfigError(f"Invalid `window_attn_skip_freq`: {kind}, {window_attn_skip_freq!r}; use an integer or a list")


def set_model_config_attribute(model: Any, attribute: str, value: Any) -> None:
    """Set an attribute of the configurations of a model and its modules, once in each that has it."""
    inner = model
    while not isinstance(inner, nn.Module):
        inner = inner.module
    configs = {id(config): config for each in inner.modules() if (config := getattr(each, "config", None)) is not None}
    for config in configs.values():
        if hasattr(config, attribute):
            setattr(config, attribute, value)


def set_model_to_sequence_parallel(model: nn.Module, set_to: bool = False) -> None:
    """Raise ConfigError unless the model was built with this setting, which cannot change later."""
    now = {
        each.sequence_parallel for each in model.modules() if isinstance(getattr(each, "sequence_parallel", None), bool)
    }
    if now - {set_to}:
        raise ConfigError(f"sequence_parallel={set_to} cannot be set on a built model; build the model with it")


def make_sharded_tensors_for_checkpoint(
    state_dict: dict[str, Tensor],
    prefix: str,
    tensor_parallel_layers_axis_map: dict[str, int] | None = None,
    sharded_offsets: tuple[Any, ...] = (),
    tp_group: Group | None = None,
    dp_cp_group: Group | None = None,
) -> dict[str, ShardedTensor]:
    """Return all tensors of a layer; tensors in the map are split along its axes, the others are whole."""
    axes, groups, found = tensor_parallel_layers_axis_map or {}, {"tp_group": tp_group, "dp_cp_group": dp_cp_group}, {}
    for name, tensor in state_dict.items():
        given: Any = {"tensor": tensor, "key": prefix + name, "prepend_offsets": sharded_offsets, **groups}
        if name in axes:
            found[prefix + name] = make_tp_sharded_tensor_for_checkpoint(**given, tp_axis=axes[name])
        else:
            found[prefix + name] = make_sharded_tensor_for_checkpoint(**given)
    return found


def sharded_state_dict_default(
    module: nn.Module,
    prefix: str = "",
    sharded_offsets: tuple[Any, ...] = (),
    metadata: dict[str, Any] | None = None,
    **groups: Any,
) -> dict[str, Any]:
    """Return ``module.sharded_state_dict(...)`` if it exists, else the result of ``module.sharded``."""
    own: Any = getattr(module, "sharded_state_dict", None)
    if own is not None:
        return own(prefix=prefix, sharded_offsets=sharded_offsets, metadata=metadata)
    if sharded_offsets:
        raise ConfigError(f"sharded_offsets={sharded_offsets} is not supported; give every layer its own name")
    return dict(sharded(module, prefix))


def ensure_metadata_has_dp_cp_group(metadata: dict[str, Any] | None) -> dict[str, Any]:
    """Return ``metadata`` with the group of data and context parallelism under "dp_cp_group"."""
    found = {} if metadata is None else metadata
    found.setdefault("dp_cp_group", parallel_state.get_data_parallel_group(with_context_parallel=True))
    return found


def _device() -> torch.device:
    return torch.device(torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def make_sharded_object_for_checkpoint(
    obj: Any, key: str, sharded_offsets: tuple[Any, ...] = (), replica_id: Any = None, **groups: Any
) -> ShardedObject:
    """Return a JSON value that the first tensor- and data-parallel rank saves."""
    if sharded_offsets:
        raise ConfigError(f"sharded_offsets={sharded_offsets} is not supported; give every layer its own name")
    tp, dp = current().group("tp"), current().group("dp-cp")
    return ShardedObject(key, obj, (1,), (0,), (0, tp.rank(), dp.rank()) if replica_id is None else replica_id)
