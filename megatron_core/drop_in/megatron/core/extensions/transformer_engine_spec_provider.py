"""The classes of a layer's parts under Transformer Engine's names."""

from typing import Any

from megatron.core.extensions.transformer_engine import (
    TEColumnParallelLinear,
    TEDotProductAttention,
    TELayerNormColumnParallelLinear,
    TELinear,
    TENorm,
    TERowParallelLinear,
)
from megatron.core.models.backends import BackendSpecProvider


class TESpecProvider(BackendSpecProvider):
    """The classes of ``extensions.transformer_engine``."""

    def __init__(self, fallback_to_eager_attn: bool = False, **settings: Any) -> None: ...

    def linear(self) -> Any:
        """The class of projections that are not split."""
        return TELinear

    def column_parallel_linear(self) -> Any:
        """The class of projections whose output is split."""
        return TEColumnParallelLinear

    def row_parallel_linear(self) -> Any:
        """The class of projections whose input is split."""
        return TERowParallelLinear

    def fuse_layernorm_and_linear(self) -> bool:
        """Whether a projection includes the norm before it."""
        return True

    def column_parallel_layer_norm_linear(self) -> Any:
        """The class of projections with a norm."""
        return TELayerNormColumnParallelLinear

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> Any:
        """The class of the norm, whose kind ``config.normalization`` selects."""
        return TENorm

    def core_attention(self) -> Any:
        """The class of attention without projections."""
        return TEDotProductAttention
