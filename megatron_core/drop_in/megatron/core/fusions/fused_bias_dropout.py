"""Bias, dropout and residual sum in one function."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

BiasDropoutAdd = Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]


def _bias_dropout_add_func(
    x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, prob: float, training: bool
) -> Tensor:
    """residual + dropout(x + bias), in the wider of both dtypes; in place without training and gradients.

    torch's generator draws the mask, as in Megatron; the engine's layers use ``KeyedDropout``.
    """
    x, bias = x_with_bias
    dtype = torch.promote_types(x.dtype, residual.dtype)
    x, residual = x.to(dtype), residual.to(dtype)
    bias = None if bias is None else bias.to(dtype)
    tracked = torch.is_grad_enabled() and (x.requires_grad or residual.requires_grad)
    if not training and not tracked:
        return (x if bias is None else x.add_(bias)).add_(residual)
    return residual + nn.functional.dropout(x if bias is None else x + bias, p=prob, training=training)


def get_bias_dropout_add(training: bool, fused: bool) -> BiasDropoutAdd:
    """Return ``f(x_with_bias, residual, prob)``; ``fused`` has no effect."""
    return lambda x_with_bias, residual, prob: _bias_dropout_add_func(x_with_bias, residual, prob, training)


def bias_dropout_add_unfused(training: bool) -> BiasDropoutAdd:
    """Return ``get_bias_dropout_add(training, False)``."""
    return get_bias_dropout_add(training, fused=False)


bias_dropout_add_fused_train = get_bias_dropout_add(training=True, fused=True)
bias_dropout_add_fused_inference = get_bias_dropout_add(training=False, fused=True)
