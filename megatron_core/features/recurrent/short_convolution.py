"""Gated short convolutions: layers in which each output depends on the last few tokens."""

from typing import Any, ClassVar

from torch import Tensor

from megatron_core.features.recurrent import kinds
from megatron_core.features.recurrent.recurrent_layer import RecurrentLayer, fused_linear
from megatron_core.transformer.context import LayerContext


class ShortConvolution(RecurrentLayer):
    """x -> W_o (c * convolution(b * u)) with b, c, u = W x, where the convolution has neither bias nor activation.

    Its channels are split over the tensor-parallel ranks. The states of this layer have no elements: in generation, the
    cache stores the last inputs of the convolution, b * u.
    Source: Liquid AI 2025, LFM2 (arXiv 2511.23404), section 2; b, c and u in the order of the published weights.
    """

    recurrence: ClassVar[type[kinds.ShortConvolutionKind]] = kinds.ShortConvolutionKind

    def __init__(self, context: LayerContext, layer_number: int, **_: Any) -> None:
        super().__init__(context, layer_number)
        self.in_proj = fused_linear(context, self.recurrence(context.config).pieces)

    def _divided(self, mixed: Tensor) -> tuple[Tensor, Tensor]:
        before, after, inputs = mixed.split(self.pieces, dim=-1)
        return before * inputs, after

    def _recur(
        self, convolved: Tensor, gates: Tensor, *, by_steps: bool = False, **extra: Any
    ) -> tuple[Tensor, Tensor]:
        outputs = convolved.unsqueeze(-1)
        return outputs, extra.get("state", outputs[:, :0])

    def _gated(self, outputs: Tensor, gates: Tensor) -> Tensor:
        return outputs.flatten(-2) * gates
