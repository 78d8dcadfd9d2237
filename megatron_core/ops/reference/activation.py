"""Bias and activation of the feed-forward layer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional


def bias_activation(x: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    """y = f(x + bias), the sum in the precision of ``x``; a gated f halves the last dim."""
    return FUNCTIONS[kind](x if bias is None else x + bias)


def squared_relu(x: Tensor) -> Tensor:
    """relu(x)^2 (So et al. 2021)."""
    return torch.relu(x).square()


def gated(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """function(gate) * value, ``x`` ``[..., 2 m]`` being the gate and then the value (Shazeer 2020)."""
    gate, value = x.chunk(2, dim=-1)
    return function(gate) * value


gelu_tanh = partial(functional.gelu, approximate="tanh")

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_tanh": gelu_tanh,
    "squared_relu": squared_relu,
    "swiglu": partial(gated, functional.silu),
    "geglu": partial(gated, functional.gelu),
    "geglu_tanh": partial(gated, gelu_tanh),
}
"""The activations by name; GELU: Hendrycks and Gimpel 2016."""
