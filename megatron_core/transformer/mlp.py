"""The feed-forward part of a layer."""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from megatron_core.config import ModelConfig
from megatron_core.ops.activation import Kind, bias_activation, xielu
from megatron_core.ops.reference import XIELU_BETA
from megatron_core.parallel.sharding import allocate, replicated, split_fused
from megatron_core.transformer.context import LayerContext, SequenceContext

INITIAL_ALPHA = 0.8
"""Slopes of xIELU at the start: of x^2 for positive inputs, and of the exponential part for negative ones."""


class MLP(nn.Module):
    """x -> W_2 f(W_1 x); gated: W_2 (f(W_g x) * W_u x) with W_g and W_u stacked in one matrix (Shazeer 2020).

    ``[s, b, h]`` -> ``[s, b, h]``; each rank has ffn/tp of the inner features, in both gate and value.
    """

    is_joinable = True
    """See ``transformer.joined``."""

    def __init__(self, context: LayerContext, layer_number: int) -> None:
        super().__init__()
        config = context.config
        ffn = context.config.ffn_size
        # Gate and value of a feature are on the same rank, so that their product needs no communication.
        pieces = (ffn, ffn) if config.gated_linear_unit else (ffn,)
        self.activation = XIELU(context) if config.xielu else activation_of(config)
        self.linear_fc1 = context.column_linear(
            config.hidden_size,
            sum(pieces),
            bias=config.add_bias_linear,
            # The activation adds the bias in its own pass.
            skip_bias_add=True,
            spec=partial(split_fused, pieces=pieces),
        )
        self.linear_fc2 = context.output_linear(ffn)
        self.gate_multiplier, self.output_multiplier = config.mlp_multipliers

    def forward(self, hidden: Tensor, context: SequenceContext) -> tuple[Tensor, Tensor | None]:
        """Return (W_2 f(W_1 x), its bias or None); the residual addition adds the bias."""
        inner, bias = self.linear_fc1(hidden)
        if self.gate_multiplier != 1.0:
            inner, bias = (self._with_scaled_gate(tensor) for tensor in (inner, bias))
        return scaled(self.linear_fc2(self.activation(inner, bias)), self.output_multiplier)

    def _with_scaled_gate(self, inner: Tensor | None) -> Tensor | None:
        if inner is None:
            return None
        gate, up = inner.chunk(2, dim=-1)
        return torch.cat([gate * self.gate_multiplier, up], dim=-1)


class XIELU(nn.Module):
    """xIELU of the sum of input and bias, with two learned numbers (Huang and Schlag 2024, arXiv 2411.13010).

    ``ops.activation.xielu`` has the formula. Each tensor-parallel rank has other inner features, and so a part of the
    gradients of the numbers.
    """

    def __init__(self, context: LayerContext) -> None:
        super().__init__()
        parallel = context.parallel
        spec = replicated((1,), context.tp_group.rank(), partial_grad=True)
        self.alpha_p = allocate(spec, parallel.params_dtype, parallel.device)
        self.alpha_n = allocate(spec, parallel.params_dtype, parallel.device)
        self.alpha_p.init_method = partial(nn.init.constant_, val=math.log(math.expm1(INITIAL_ALPHA)))
        self.alpha_n.init_method = partial(nn.init.constant_, val=math.log(math.expm1(INITIAL_ALPHA - XIELU_BETA)))

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """``[..., n]`` -> ``[..., n]``."""
        return xielu(x, bias, self.alpha_p, self.alpha_n)


def scaled(output: tuple[Tensor, Tensor | None], factor: float) -> tuple[Tensor, Tensor | None]:
    """``factor`` times an output and its bias."""
    if factor == 1.0:
        return output
    x, bias = output
    return x * factor, None if bias is None else bias * factor


def activation_of(config: ModelConfig) -> Callable[[Tensor, Tensor | None], Tensor]:
    """Return the function of the output of the MLP's first matrix and its bias."""
    function = partial(bias_activation, activation=activation_kind(config), backend=config.kernel_backend)
    if not config.gated_linear_unit:
        return function
    return partial(function, limit=config.activation_func_clamp_value, offset=config.glu_linear_offset)


def activation_kind(config: ModelConfig) -> Kind:
    """Return the activation function of the MLP; gated functions halve the last dim."""
    if config.swiglu:
        return "swiglu"
    if config.geglu:
        return "geglu_tanh" if config.openai_gelu else "geglu"
    if config.quick_geglu:
        return "quick_geglu"
    if config.squared_relu:
        return "squared_relu"
    if config.relu:
        return "relu"
    return "gelu_tanh" if config.openai_gelu else "gelu"
