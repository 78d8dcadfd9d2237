"""The classes of a layer's parts, as specifications of a caller's own ask for them."""

from functools import partial
from typing import Any

from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.torch_norm import WrappedTorchNorm


class BackendSpecProvider:
    """Names the classes of projections, norms, attention and experts."""

    def column_parallel_linear(self) -> Any:
        """The class of projections whose output is split."""
        return ColumnParallelLinear

    def row_parallel_linear(self) -> Any:
        """The class of projections whose input is split."""
        return RowParallelLinear

    def fuse_layernorm_and_linear(self) -> bool:
        """Whether a projection includes the norm before it."""
        return False

    def column_parallel_layer_norm_linear(self) -> Any:
        """The class of projections with a norm, or None."""
        return None

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> Any:
        """The class of the norm, whose kind ``config.normalization`` selects."""
        return WrappedTorchNorm

    def core_attention(self) -> Any:
        """The class of attention without projections."""
        return DotProductAttention

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool, *others: Any) -> Any:
        """The constructor of experts."""
        return partial(TEGroupedMLP, submodules=None)

    def activation_func(self) -> Any:
        """None: ``config.activation_func`` selects the function."""
        return None


class LocalSpecProvider(BackendSpecProvider):
    """The classes without Transformer Engine."""
