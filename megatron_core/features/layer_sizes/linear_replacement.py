"""One linear layer in place of the attention or the MLP of a layer."""

from typing import Any

import torch
from torch import Tensor

from megatron_core.parallel.collectives import exchange_parts, gather_channels
from megatron_core.tensor_parallel import ColumnParallelLinear
from megatron_core.transformer.context import LayerContext


class LinearReplacement(ColumnParallelLinear):
    """x -> W x + b, ``[s, b, h]`` -> the same shape (``[s/tp, b, h]`` with sequence parallelism).

    The rows of W are split over the tensor-parallel ranks, whose outputs are gathered; with sequence parallelism an
    all-to-all gives each rank all channels of its part of the sequence.
    Source: Bercovich et al. 2024, Puzzle (arXiv 2411.19146), section 2; weights as in Megatron Core's
    ``ColumnParallelLinearGathered``.
    """

    def __init__(self, context: LayerContext, layer_number: int, **of_attention: Any) -> None:
        """``of_attention``: constructors of parts that it does not have."""
        size = context.config.hidden_size
        super().__init__(
            size,
            size,
            config=context.parallel,
            init_method=context.init_method,
            bias=context.config.add_bias_linear,
            tp_group=context.tp_group,
        )

    def forward(self, hidden: Tensor, context: Any = None) -> tuple[Tensor, Tensor | None]:
        """Return (W x + b, None); ``context`` is not read."""
        output, _ = super().forward(hidden)
        if not self.config.sequence_parallel:
            return gather_channels(output, self.tp_group), None
        # 1/tp of the bytes of a gather whose result is then split along the sequence.
        by_rank = exchange_parts(output.unflatten(0, (self.tp_size, -1)), self.tp_group)
        return torch.cat(by_rank.unbind(), dim=-1), None
