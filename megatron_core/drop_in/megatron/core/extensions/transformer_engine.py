"""Transformer Engine's modules, implemented by the engine's layers with the same arguments.

They run on any device; ``--kernel-backend transformer_engine`` selects Transformer Engine's kernels.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.spec_utils import WrappedTorchNorm
from megatron_core.errors import ConfigError
from megatron_core.ops import layer_norm, rms_norm
from megatron_core.parallel.current import current
from megatron_core.parallel.groups import ALONE
from megatron_core.parallel.sharding import allocate, replicated
from megatron_core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

HAVE_TE = False


def SplitAlongDim(tensor: Tensor, dim: int, split_size_or_sections: Any, squeeze: bool = False) -> tuple[Tensor, ...]:
    """``torch.split``; ``squeeze`` removes ``dim`` from parts of size 1."""
    parts = torch.split(tensor, split_size_or_sections, dim)
    return tuple(part.squeeze(dim) for part in parts) if squeeze else tuple(parts)


def te_checkpoint(
    forward_func: Callable[..., Any],
    distribute_saved_activations: bool,
    get_rng_state_tracker: Any,
    tp_group: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Return ``forward_func(*args)``, recomputed in backward; ConfigError for ``distribute_saved_activations``."""
    if distribute_saved_activations:
        raise ConfigError("distribute_saved_activations=True is not supported; remove it")
    return checkpoint(forward_func, *args, use_reentrant=False, **kwargs)


class TELinear(ColumnParallelLinear):
    """y = W x + b with unsplit W on every tensor-parallel rank: ``parallel_mode`` "duplicated" or None.

    Raises ConfigError for "column" and "row"; use ``TEColumnParallelLinear`` and ``TERowParallelLinear``.
    """

    def __init__(
        self, input_size: int, output_size: int, *, parallel_mode: str | None = None, config: Any, **others: Any
    ) -> None:
        if parallel_mode not in (None, "duplicated"):
            raise ConfigError(f"TELinear: parallel_mode={parallel_mode!r}; use TEColumn- or TERowParallelLinear")
        rank = current().group("tp").rank()
        others |= {"spec": lambda shape, **_: replicated(shape, rank, partial_grad=config.sequence_parallel)}
        super().__init__(input_size, output_size, config=config, **others | {"tp_group": ALONE})


class TENorm(WrappedTorchNorm):
    """The norm of ``config.normalization``."""


class TEColumnParallelLinear(ColumnParallelLinear):
    """``ColumnParallelLinear``."""


class TERowParallelLinear(RowParallelLinear):
    """``RowParallelLinear``."""


class TEDotProductAttention(DotProductAttention):
    """``DotProductAttention``."""


class TELayerNormColumnParallelLinear(ColumnParallelLinear):
    """A norm with the weights ``layer_norm_weight`` and ``layer_norm_bias``, and a ``ColumnParallelLinear``."""

    normalizes_input = True
    """In a layer's specification this adds the layer's norm if the specification has none."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **others: Any) -> None:
        super().__init__(input_size, output_size, config=config, **others)
        self.epsilon, self.layer_norm_bias = config.layernorm_epsilon, None
        self.layer_norm_weight = self._of_norm(input_size, nn.init.ones_)
        if config.normalization == "LayerNorm":
            self.layer_norm_bias = self._of_norm(input_size, nn.init.zeros_)

    def _of_norm(self, size: int, fill: Any) -> Any:
        spec = replicated((size,), self.tp_index, partial_grad=self.config.sequence_parallel)
        parameter: Any = allocate(spec, self.config.params_dtype, self.config.device)
        parameter.init_method = fill
        fill(parameter)
        return parameter

    def forward(self, input_: Tensor, weight: nn.Parameter | None = None) -> tuple[Tensor, Tensor | None]:
        """Return the product of the normalized input."""
        if self.layer_norm_bias is None:
            normed = rms_norm(input_, self.layer_norm_weight, self.epsilon, backend=self.config.kernel_backend)
        else:
            norm = (self.layer_norm_weight, self.layer_norm_bias, self.epsilon)
            normed = layer_norm(input_, *norm, backend=self.config.kernel_backend)
        return super().forward(normed, weight)
