"""Norms by NVIDIA's Transformer Engine, from version 2 on, for comparison; never needed.

Loaded only where ``kernel_backend='transformer_engine'`` asks for it. The functions are those that its own modules
call (``transformer_engine/pytorch/ops/basic``): ``rmsnorm_fwd(x, weight, epsilon, out, quantizer, dtype, sm_margin,
zero_centered_gamma)`` and its like, on rows ``[rows, n]``.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

OPS = ("layer_norm", "rms_norm")
"""The operations that it has an equivalent of."""
EXTENSION = "transformer_engine_torch"
"""The compiled module behind them."""
SM_MARGIN, ZERO_CENTERED = 0, False


def why_not(device_type: str, dtype: torch.dtype) -> str | None:
    """Why Transformer Engine cannot serve tensors of a kind; None if it can."""
    if find_spec(EXTENSION) is None:
        return f'{EXTENSION} is not installed; pip install "transformer-engine[pytorch]>=2"'
    if device_type != "cuda":
        return f"Transformer Engine is for cuda, not {device_type}"
    return None if dtype != torch.float64 else f"Transformer Engine has no {dtype}"


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """y = x / sqrt(mean(x^2) + epsilon) * weight over the last dim."""
    return _Norm.apply(x, weight, None, epsilon)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    """y = (x - mean) / sqrt(variance + epsilon) * weight + bias over the last dim."""
    return _Norm.apply(x, weight, bias, epsilon)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> Tensor:
        import transformer_engine_torch as engine
        from transformer_engine.pytorch.constants import TE_DType

        rows = x.reshape(-1, x.shape[-1]).contiguous()
        given = (epsilon, None, None, TE_DType[x.dtype], SM_MARGIN, ZERO_CENTERED)
        if bias is None:
            y, mean, rstd = engine.rmsnorm_fwd(rows, weight, *given)
        else:
            y, mean, rstd = engine.layernorm_fwd(rows, weight, bias, *given)
        ctx.save_for_backward(rows, weight, mean, rstd)
        ctx.centered = bias is not None
        return y.view(x.shape)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        import transformer_engine_torch as engine

        rows, weight, mean, rstd = ctx.saved_tensors
        given = dy.reshape(rows.shape).contiguous(), rows
        if ctx.centered:
            dx, dweight, dbias = engine.layernorm_bwd(*given, mean, rstd, weight, SM_MARGIN, ZERO_CENTERED)
        else:
            (dx, dweight), dbias = engine.rmsnorm_bwd(*given, rstd, weight, SM_MARGIN, ZERO_CENTERED), None
        return dx.view(dy.shape), dweight, dbias, None
