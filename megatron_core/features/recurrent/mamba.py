"""Mamba-2 mixers: layers with a state space of each head instead of attention over all earlier tokens."""

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from megatron_core.features.recurrent import kinds
from megatron_core.features.recurrent.recurrent_layer import RecurrentLayer, fused_linear, log_of_decay_rates, of_heads
from megatron_core.features.recurrent.state_space import chunked_state_space, state_space_by_steps
from megatron_core.ops.rows import wide
from megatron_core.transformer.context import LayerContext

STEPS = (1e-3, 0.1)
"""Range of initial steps dt, as in Megatron Core and the paper's code."""


def bias_of_steps(tensor: Tensor) -> Tensor:
    """Fill with the inverse of softplus at numbers whose logarithms are drawn evenly from those of ``STEPS``."""
    step = tensor.uniform_(*map(math.log, STEPS)).exp()
    return tensor.copy_(step + (-(-step).expm1()).log())


class MambaMixer(RecurrentLayer):
    """x -> W_o norm((y + D u) * silu(z)), where y are the outputs of the state space (``state_space``)

        u, B, C   convolution of W x: inputs of the heads, keys and queries of the groups
        dt        softplus(W_dt x + b), between --mamba-dt-min and --mamba-dt-max
        decay     g = -e^A dt; the values are dt u
        gate      z = W_z x

    Each group of B and C serves several adjacent heads, and the norm is over the channels of each group's heads.
    Groups and heads are split over the tensor-parallel ranks. ``mamba_output_norm`` can move the norm before the gate
    or remove it, and ``mamba_multipliers`` are factors on the five projections.
    Source: Dao and Gu 2024 (arXiv 2405.21060), section 7; names of the weights as in Megatron Core's ``MambaMixer``,
    with the pieces u, B, C, z, dt in this order.
    """

    is_joinable = True
    """See ``transformer.joined``."""

    recurrence: ClassVar[type[kinds.Mamba2]] = kinds.Mamba2

    def __init__(self, context: LayerContext, layer_number: int, **_: Any) -> None:
        super().__init__(context, layer_number)
        config = context.config
        sizes = self.recurrence(context.config)
        self.in_proj = fused_linear(context, sizes.pieces)
        self.A_log, self.dt_bias = (of_heads(context, sizes.heads) for _ in range(2))
        self.A_log.init_method = log_of_decay_rates
        self.dt_bias.init_method = bias_of_steps
        if sizes.has_skip:
            self.D = of_heads(context, sizes.heads)
            self.D.init_method = nn.init.ones_
        self.inner = sizes.heads * sizes.value_head_size // context.tp_group.size()
        self.output_norm = config.mamba_output_norm
        self.norm = None
        if self.output_norm != "none":
            self.norm = of_heads(context, sizes.heads * sizes.value_head_size)
            self.norm.init_method = nn.init.ones_
        self.multipliers = config.mamba_multipliers
        self.step_range = config.mamba_dt_min, config.mamba_dt_max
        self.groups = config.mamba_num_groups // context.tp_group.size()

    def _projected(self, hidden: Tensor) -> Tensor:
        mixed, _ = self.in_proj(hidden)
        if all(factor == 1.0 for factor in self.multipliers):
            return mixed
        pieces = mixed.split(self.pieces, dim=-1)
        return torch.cat([piece * factor for piece, factor in zip(pieces, self.multipliers, strict=True)], dim=-1)

    def _recur(
        self, convolved: Tensor, gates: Tensor, *, by_steps: bool = False, **extra: Any
    ) -> tuple[Tensor, Tensor]:
        dtype = wide(convolved.dtype)
        inputs, key, query = convolved.to(dtype).split(self.pieces[:3], dim=-1)
        key, query = (x.unflatten(-1, (self.groups, self.keys)) for x in (key, query))
        inputs = inputs.unflatten(-1, (-1, self.values))
        step = nn.functional.softplus(gates[..., self.inner :].to(dtype) + self.dt_bias.to(dtype))
        step = step.clamp(*self.step_range)
        decay = -self.A_log.to(dtype).exp() * step
        rule = state_space_by_steps if by_steps else chunked_state_space
        outputs, state = rule(query, key, inputs * step.unsqueeze(-1), decay, **extra)
        return outputs + self.D.to(dtype).unsqueeze(-1) * inputs, state

    def _gated(self, outputs: Tensor, gates: Tensor) -> Tensor:
        dtype = wide(outputs.dtype)
        gate = nn.functional.silu(gates[..., : self.inner].to(dtype))
        gated = outputs.flatten(-2).to(dtype)
        if self.output_norm == "before_gate":
            return (self._normed(gated) * gate).to(outputs.dtype)
        gated = gated * gate
        return (gated if self.norm is None else self._normed(gated)).to(outputs.dtype)

    def _normed(self, x: Tensor) -> Tensor:
        """RMSNorm over the channels of each group's heads."""
        assert self.norm is not None
        size = x.shape[-1] // self.groups
        normed = nn.functional.rms_norm(x.unflatten(-1, (-1, size)), (size,), eps=self.epsilon)
        return normed.flatten(-2) * self.norm.to(x.dtype)
