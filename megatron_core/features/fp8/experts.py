"""The matrix products of experts in FP8."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megatron_core.features.experts.grouped_linear import Chunks, GroupedGradients, GroupedProducts, grouped_linear
from megatron_core.features.fp8.casts import Quantised
from megatron_core.features.fp8.grouped_product import add_fp8_weight_grads_, grouped_fp8_product
from megatron_core.features.fp8.products import FP8Products
from megatron_core.tensor_parallel.linear import main_grad_of


class FP8ExpertProducts(GroupedProducts):
    """The products of a stack of experts, with the state of ``fp8``."""

    def __init__(self, fp8: FP8Products) -> None:
        self.fp8 = fp8

    def __call__(self, x: Tensor, weight: nn.Parameter, counts: Sequence[int], chunks: Chunks | None = None) -> Tensor:
        """See ``grouped_linear``."""
        return grouped_linear(x, weight, counts, products=self)

    def output(
        self, x: Tensor, weight: Tensor, counts: Sequence[int], *, training: bool
    ) -> tuple[Tensor, Quantised | None]:
        """The result of ``grouped_linear``, and the weights for dL/dx, if they are kept."""
        (rows,) = self.fp8.quantise("input", x, 1, record=training)
        matrices = self.fp8.quantised_weight(weight, training=training)
        return grouped_fp8_product(rows, matrices[1].t(), counts, x.dtype), matrices.get(0)

    def gradients(
        self, weight: nn.Parameter, grad_y: Tensor, counts: Sequence[int], saved: Quantised | None
    ) -> GroupedGradients:
        """The products of backward."""
        return FP8GroupedGradients(self.fp8, weight, grad_y, counts, saved)


class FP8GroupedGradients(GroupedGradients):
    """The products of backward in FP8."""

    def __init__(
        self,
        fp8: FP8Products,
        weight: nn.Parameter,
        grad_y: Tensor,
        counts: Sequence[int],
        kept_weight: Quantised | None,
    ) -> None:
        super().__init__(weight, grad_y, counts)
        self.fp8 = fp8
        self.kept_weight = kept_weight
        (self._rows,) = fp8.quantise("grad", grad_y, 1, record=True)

    def of_weight(self, x: Tensor) -> Tensor | None:
        """In FP8 with one scale for all rows, or in the precision of ``grad_y``."""
        if not self.fp8.multiplies_weight_grad():
            return super().of_weight(x)
        (inputs,) = self.fp8.quantise("input", x, 0)
        main_grad = main_grad_of(self.weight)
        total = torch.zeros_like(self.weight) if main_grad is None else main_grad
        add_fp8_weight_grads_(total, self._rows, inputs, self.counts)
        return total if main_grad is None else None

    def of_input(self) -> Tensor:
        """dL/dx ``[R, I]``."""
        weight = self.kept_weight
        if weight is None:
            (weight,) = self.fp8.quantise("weight", self.weight.detach(), 0)
        return grouped_fp8_product(self._rows, weight, self.counts, self.grad_y.dtype)
