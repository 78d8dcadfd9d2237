"""Norms by NVIDIA's apex (https://github.com/NVIDIA/apex, ``apex.normalization``), for comparison; never needed.

Loaded only where ``kernel_backend='apex'`` asks for it. It has to be built from its sources, with CUDA: the package
``apex`` of the Python package index is another one.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

OPS = ("layer_norm", "rms_norm")
"""The operations that it has an equivalent of."""
EXTENSION = "fused_layer_norm_cuda"
"""The compiled module behind them."""


def why_not(device_type: str, dtype: torch.dtype) -> str | None:
    """Why apex cannot serve tensors of a kind; None if it can."""
    if find_spec(EXTENSION) is None:
        return f"apex's extension {EXTENSION} is not installed; build apex from https://github.com/NVIDIA/apex"
    if device_type != "cuda":
        return f"apex is for cuda, not {device_type}"
    return None if dtype != torch.float64 else f"apex has no {dtype}"


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """y = x / sqrt(mean(x^2) + epsilon) * weight over the last dim."""
    from apex.normalization.fused_layer_norm import fused_rms_norm_affine

    return fused_rms_norm_affine(x, weight, list(weight.shape), epsilon)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    """y = (x - mean) / sqrt(variance + epsilon) * weight + bias over the last dim."""
    from apex.normalization.fused_layer_norm import fused_layer_norm_affine

    return fused_layer_norm_affine(x, weight, bias, list(weight.shape), epsilon)
