"""Rows of a table of embeddings, and its gradient, which has few rows other than zero."""

from typing import Any

import torch
from torch import Tensor, nn

from megatron_core.tensor_parallel.linear import main_grad_of


def vocab_parallel_lookup(tokens: Tensor, weight: Tensor, first: int, size: int, *, in_place: bool = False) -> Tensor:
    """Rows of ``weight``, which holds the rows from ``first`` on of a table split over ``size`` ranks; zero for other
    ids.

    ``in_place``: add the gradient of the table to ``weight.main_grad``, if it exists, row by row.
    """
    lookup = _lookup if in_place else nn.functional.embedding
    if size == 1:
        return lookup(tokens, weight)
    elsewhere = (tokens < first) | (tokens >= first + weight.shape[0])
    # Any legal row will do for ids of other ranks: its result is masked, and so is its gradient.
    local = (tokens - first).masked_fill(elsewhere, 0)
    # Masked and not multiplied by 0, which would turn an infinite weight into NaN.
    return lookup(local, weight).masked_fill(elsewhere.unsqueeze(-1), 0.0)


def _lookup(tokens: Tensor, weight: Tensor) -> Tensor:
    # On GPUs torch sorts the tokens, so that the order of sums is the same in each run; index_add_ does not.
    adds = weight.is_cpu and hasattr(weight, "main_grad") and torch.is_grad_enabled()
    if not adds or torch.compiler.is_compiling():
        return nn.functional.embedding(tokens, weight)
    return _Lookup.apply(tokens, weight)


class _Lookup(torch.autograd.Function):
    """``nn.functional.embedding`` without a gradient of the size of the table, which takes four passes over it."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: nn.Parameter) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.weight = weight
        return nn.functional.embedding(tokens, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        (tokens,) = ctx.saved_tensors
        main_grad = main_grad_of(ctx.weight)
        assert main_grad is not None, "the table had a main_grad in forward"
        main_grad.index_add_(0, tokens.reshape(-1), grad.reshape(-1, grad.shape[-1]).to(main_grad.dtype))
        return None, None
