"""A linear layer that every tensor-parallel rank has as a whole."""

from functools import partial
from typing import Any

from torch import Tensor, nn

from megatron_core.parallel.sharding import allocate, replicated
from megatron_core.transformer.context import LayerContext


class DownProjection(nn.Module):
    """y = W x, ``[s, b, h]`` -> ``[s, b, size]``; W is replicated over the tensor-parallel ranks.

    With sequence parallelism, input and output are this rank's part of the sequence. ``inputs`` replaces h.
    ``divided``: each tensor-parallel rank computes other tokens, by default with sequence parallelism.
    """

    def __init__(
        self, context: LayerContext, size: int, *, inputs: int | None = None, divided: bool | None = None
    ) -> None:
        super().__init__()
        shape = (size, inputs or context.config.hidden_size)
        # Each rank then sees other tokens, and its gradient of the replicated weight is a part of the sum.
        divided = context.sequence_parallel if divided is None else divided
        spec = replicated(shape, context.tp_group.rank(), partial_grad=divided)
        self.weight = allocate(spec, context.parallel.params_dtype, context.parallel.device)
        self.weight.init_method = context.init_method
        self.adapter: Any = None
        ranks = context.tp_group.size() if divided else 1
        self.product = context.parallel.arithmetic.whole_product(size, ranks)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., h]`` -> ``[..., size]``."""
        product = partial(self.product, weight=self.weight, bias=None)
        return product(x) if self.adapter is None else self.adapter(x, product, self.weight)
