"""y = x W_e^T for contiguous rows per expert, with gradients added to ``main_grad``; other products in its place."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron_core.features.experts.grouped import accumulate_grouped_weight_grad_, grouped_product, grouped_weight_grad
from megatron_core.parallel.groups import Group
from megatron_core.parallel.sharding import ShardSpec
from megatron_core.tensor_parallel.arithmetic import LayerArithmetic, SplitOver
from megatron_core.tensor_parallel.linear import defers_weight_grad, main_grad_of


def grouped_linear(
    x: Tensor, weight: nn.Parameter, counts: Sequence[int], *, products: "GroupedProducts | None" = None
) -> Tensor:
    """``x`` ``[R, I]``, ``weight`` ``[E, O, I]`` -> ``[R, O]``; expert e has the next ``counts[e]`` rows.

    Weight gradients are handled as in ``parallel_linear``: added to ``main_grad`` in its precision, or deferred by a
    split backward. An expert without rows has gradient 0. ``products``, if given, computes the matrix products.
    """
    return _GroupedLinear.apply(x, weight, counts, products or PLAIN_GROUPED_PRODUCTS, torch.is_grad_enabled())


class GroupedProducts:
    """As ``MatrixProducts``, for a stack of experts."""

    def output(self, x: Tensor, weight: Tensor, counts: Sequence[int], *, training: bool) -> tuple[Tensor, Any]:
        """The result of ``grouped_linear``, and data for ``gradients``."""
        return grouped_product(x, weight.transpose(1, 2), counts), None

    def gradients(self, weight: nn.Parameter, grad_y: Tensor, counts: Sequence[int], saved: Any) -> "GroupedGradients":
        """The products of backward from the data of ``output``."""
        return GroupedGradients(weight, grad_y, counts)


PLAIN_GROUPED_PRODUCTS = GroupedProducts()


class GroupedGradients:
    """The products of backward in the precision of ``grad_y``."""

    def __init__(self, weight: nn.Parameter, grad_y: Tensor, counts: Sequence[int]) -> None:
        self.weight = weight
        self.grad_y = grad_y
        self.counts = counts

    def of_weight(self, x: Tensor) -> Tensor | None:
        """dL/dW_e = grad_y_e^T x_e ``[E, O, I]``; returns None if it is added to ``weight.main_grad``."""
        main_grad = main_grad_of(self.weight)
        if main_grad is None:
            return grouped_weight_grad(self.grad_y, x, self.counts)
        accumulate_grouped_weight_grad_(main_grad, self.grad_y, x, self.counts)
        return None

    def of_input(self) -> Tensor:
        """dL/dx ``[R, I]``."""
        return grouped_product(self.grad_y, self.weight.detach(), self.counts)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, counts, products, training):
        ctx.save_for_backward(x, weight)
        # After recomputation the saved weight is another tensor without main_grad and grad_queue, so keep this one.
        ctx.weight = weight
        ctx.counts = counts
        ctx.products = products
        y, ctx.saved_by_products = products.output(x, weight, counts, training=training)
        return y

    @staticmethod
    def backward(ctx, grad_y):
        x, _ = ctx.saved_tensors
        weight = ctx.weight
        # Expanded gradients, as of a sum, have stride 0, which grouped products do not take.
        gradients = ctx.products.gradients(weight, grad_y.contiguous(), ctx.counts, ctx.saved_by_products)
        grad_weight = None
        if ctx.needs_input_grad[1] and not defers_weight_grad(weight, lambda: gradients.of_weight(x)):
            grad_weight = gradients.of_weight(x)
        return gradients.of_input() if ctx.needs_input_grad[0] else None, grad_weight, None, None, None


@dataclass(frozen=True)
class TokenNumbers:
    """Numbers of this rank's tokens that give the rows of an expert one order in every layout."""

    of_tokens: Tensor
    """``[T]`` int64: sequence x its length + position."""
    chunk: int
    """Tokens in a chunk of a sequence."""


@dataclass(frozen=True)
class Chunks:
    """The rows of each expert in chunks of sequences: rows are ordered by expert, sequence and position."""

    experts: tuple[slice, ...]
    """The rows of each expert."""
    of_expert: tuple[tuple[slice, ...], ...]
    """For each expert, the rows of each chunk of a sequence that has any."""


class ExpertArithmetic:
    """Plain products of experts; base class of a ``LayerArithmetic`` with others."""

    def expert_output_product(self, spec: ShardSpec, split_over: SplitOver, group: Group) -> Callable[..., Tensor]:
        """As ``output_product`` for a stack of experts, called as ``grouped_linear`` with the chunks of the rows."""
        return expert_product

    def expert_input_product(self, inputs: int, group: Group) -> Callable[..., Tensor]:
        """As ``input_product`` for a stack of experts."""
        return expert_product

    def times_probs(self, activated: Tensor, probs: Tensor, group: Group) -> Tensor:
        """Rows ``[R, n]``, of which the ranks of ``group`` have other columns, times their probabilities ``[R]``."""
        # Probabilities are float32 or wider; the product keeps the dtype of the rows.
        return (activated * probs.unsqueeze(-1)).to(activated.dtype)

    def token_numbers(self, positions: Tensor, sample_index: Tensor | None, ranks: int) -> TokenNumbers | None:
        """Numbers of tokens that order the rows of experts; None: any order.

        ``positions`` are those of tokens of each sequence, which are divided over ``ranks`` tensor-parallel ranks;
        ``sample_index`` the numbers of the sequences, or None in generation.
        """
        return None


def expert_arithmetic(arithmetic: LayerArithmetic) -> ExpertArithmetic:
    """The products of experts in layers with ``arithmetic``."""
    return arithmetic if isinstance(arithmetic, ExpertArithmetic) else ExpertArithmetic()


def expert_product(x: Tensor, weight: nn.Parameter, counts: Sequence[int], chunks: Chunks | None = None) -> Tensor:
    """``grouped_linear`` with the arguments of the products of experts."""
    return grouped_linear(x, weight, counts)
