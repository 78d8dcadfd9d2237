"""The classes of a layer's parts, as specifications of a caller's own ask for them."""

from functools import partial
from typing import Any

from megatron.core.extensions.transformer_engine import (
    TEColumnParallelLinear,
    TEDotProductAttention,
    TELayerNormColumnParallelLinear,
    TELinear,
    TENorm,
    TERowParallelLinear,
)
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe.moe_layer import TEGroupedMLP
from megatron.core.transformer.spec_utils import WrappedTorchNorm


def returns(value: Any, doc: str) -> Any:
    """Return a method that takes any arguments and returns ``value``."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return value

    method.__doc__ = doc
    return method


class BackendSpecProvider:
    """Names the classes of projections, norms, attention and experts."""

    column_parallel_linear = returns(ColumnParallelLinear, "The class of projections whose output is split.")
    row_parallel_linear = returns(RowParallelLinear, "The class of projections whose input is split.")
    fuse_layernorm_and_linear = returns(False, "Whether a projection includes the norm before it.")
    column_parallel_layer_norm_linear = returns(None, "The class of projections with a norm, or None.")
    layer_norm = returns(WrappedTorchNorm, "The class of the norm, whose kind ``config.normalization`` selects.")
    core_attention = returns(DotProductAttention, "The class of attention without projections.")
    grouped_mlp_modules = returns(partial(TEGroupedMLP, submodules=None), "The constructor of experts.")
    activation_func = returns(None, "None: ``config.activation_func`` selects the function.")


class LocalSpecProvider(BackendSpecProvider):
    """The classes without Transformer Engine."""


class TESpecProvider(BackendSpecProvider):
    """The classes of ``extensions.transformer_engine``."""

    linear = returns(TELinear, "The class of projections that are not split.")
    column_parallel_linear = returns(TEColumnParallelLinear, "The class of projections whose output is split.")
    row_parallel_linear = returns(TERowParallelLinear, "The class of projections whose input is split.")
    fuse_layernorm_and_linear = returns(True, "Whether a projection includes the norm before it.")
    column_parallel_layer_norm_linear = returns(
        TELayerNormColumnParallelLinear, "The class of projections with a norm."
    )
    layer_norm = returns(TENorm, "The class of the norm, whose kind ``config.normalization`` selects.")
    core_attention = returns(TEDotProductAttention, "The class of attention without projections.")

    def __init__(self, fallback_to_eager_attn: bool = False, **settings: Any) -> None: ...
