"""Gated delta nets: layers with a state of fixed size per head instead of attention over all earlier tokens."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from megatron_core.features.recurrent import kinds
from megatron_core.features.recurrent.delta_rule import chunked_delta_rule, delta_rule_by_steps, unit_heads
from megatron_core.features.recurrent.recurrent_layer import RecurrentLayer, fused_linear, log_of_decay_rates, of_heads
from megatron_core.ops import rms_norm
from megatron_core.ops.rows import wide
from megatron_core.parallel.sharding import allocate, replicated
from megatron_core.transformer.context import LayerContext
from megatron_core.transformer.down_projection import DownProjection


class GatedDeltaNet(RecurrentLayer):
    """x -> W_o (norm(o) * silu(z)), where o are the outputs of the gated delta rule (``delta_rule``)

        q, k, v   convolution of W x, with q and k of length 1
        decay     g = -e^A softplus(a + c), with a = W_a x
        rate      sigmoid(W_b x)
        gate      z = W_z x

    Each query and key head serves several adjacent value heads, each with its own state.
    Source: Yang et al. 2025 (arXiv 2412.06464); names and order of the weights as in Megatron Core's ``GatedDeltaNet``;
    the norm of outputs does not depend on ``apply_layernorm_1p``, as in Qwen3-Next; it is a layer norm with
    ``normalization="LayerNorm"``, as in Megatron Core.
    """

    recurrence: ClassVar[type[kinds.GatedDeltaNetKind]] = kinds.GatedDeltaNetKind
    gate_activation: Callable[[Tensor], Tensor] = staticmethod(nn.functional.silu)

    def __init__(self, context: LayerContext, layer_number: int, **_: Any) -> None:
        super().__init__(context, layer_number)
        sizes = self.recurrence(context.config)
        parallel = context.parallel
        self.shared = sizes.heads // context.config.linear_num_key_heads
        self._make_projections(context, sizes.pieces)
        self.A_log = of_heads(context, sizes.heads)
        self.dt_bias = of_heads(context, sizes.pieces[5])
        self.A_log.init_method = log_of_decay_rates
        self.dt_bias.init_method = nn.init.ones_
        # Each rank normalizes only its own heads.
        norm = replicated((self.values,), context.tp_group.rank(), partial_grad=True)
        self.out_norm = allocate(norm, parallel.params_dtype, parallel.device)
        self.out_norm.init_method = nn.init.ones_
        self.out_norm_bias: nn.Parameter | None = None
        if sizes.centers_outputs:
            self.out_norm_bias = allocate(norm, parallel.params_dtype, parallel.device)
            self.out_norm_bias.init_method = nn.init.zeros_

    def _make_projections(self, context: LayerContext, pieces: tuple[int, ...]) -> None:
        self.in_proj = fused_linear(context, pieces)

    def _decays(self, x: Tensor) -> Tensor:
        """Logarithms of the decays ``[b, n, heads]``, or ``[b, n, heads, dk]``, from their projections."""
        return -self.A_log.to(x.dtype).exp() * nn.functional.softplus(x + self.dt_bias.to(x.dtype))

    def _recur(
        self, convolved: Tensor, gates: Tensor, *, by_steps: bool = False, **extra: Any
    ) -> tuple[Tensor, Tensor]:
        rule = delta_rule_by_steps if by_steps else chunked_delta_rule
        return rule(*self._heads(convolved, gates), **extra)

    def _heads(self, convolved: Tensor, gates: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return query, key, value, decay and rate of each head, at least in float32."""
        dtype = wide(convolved.dtype)
        query, key, value = convolved.to(dtype).split(self.pieces[:3], dim=-1)
        query, key = (unit_heads(x, self.keys, self.shared) for x in (query, key))
        _, rate, decay = gates.split(self.pieces[3:], dim=-1)
        value = value.unflatten(-1, (-1, self.values))
        return query * self.keys**-0.5, key, value, self._decays(decay.to(dtype)), rate.to(dtype).sigmoid()

    def _gated(self, outputs: Tensor, gates: Tensor) -> Tensor:
        """Norm of each head's output, times its activated gate; ``[..., heads, dv]`` -> ``[..., heads * dv]``."""
        gate = gates[..., : self.pieces[3]].unflatten(-1, (-1, self.values))
        if self.out_norm_bias is not None:  # a layer norm is the RMS norm of the centered outputs, and a bias
            outputs = outputs - outputs.mean(-1, keepdim=True)
        normed = rms_norm(outputs, self.out_norm, self.epsilon, backend=self.backend)
        if self.out_norm_bias is not None:
            normed = normed + self.out_norm_bias.to(normed.dtype)
        return (normed * self.gate_activation(gate)).flatten(-2)


class KimiDeltaAttention(GatedDeltaNet):
    """``GatedDeltaNet`` with a decay for each key channel, and with gates and decays that are projections of few
    channels:

        decay     g = -e^A softplus(W_fb W_fa x + c), for each key channel of a head
        gate      the norm of o is multiplied by sigmoid(W_gb W_ga x)

    W_fa and W_ga are replicated over the tensor-parallel ranks.
    Source: Kimi Team 2025 (arXiv 2510.26692), section 3.
    """

    recurrence: ClassVar[type[kinds.GatedDeltaNetKind]] = kinds.KimiDelta
    gate_activation = staticmethod(torch.sigmoid)

    def _make_projections(self, context: LayerContext, pieces: tuple[int, ...]) -> None:
        rank = kinds.KimiDelta(context.config).rank
        self.in_proj = fused_linear(context, (*pieces[:3], pieces[4]))
        self.f_a_proj = DownProjection(context, rank)
        self.g_a_proj = DownProjection(context, rank)
        self.f_b_proj = context.column_linear(rank, pieces[5], bias=False)
        self.g_b_proj = context.column_linear(rank, pieces[3], bias=False)

    def _projected(self, hidden: Tensor) -> Tensor:
        mixed, _ = self.in_proj(hidden)
        convolved, rates = mixed.split([self.convolved, self.pieces[4]], dim=-1)
        gates, _ = self.g_b_proj(self.g_a_proj(hidden))
        decays, _ = self.f_b_proj(self.f_a_proj(hidden))
        return torch.cat([convolved, gates, rates, decays], dim=-1)

    def _decays(self, x: Tensor) -> Tensor:
        step = nn.functional.softplus(x + self.dt_bias.to(x.dtype)).unflatten(-1, (-1, self.keys))
        return -self.A_log.to(x.dtype).exp().unsqueeze(-1) * step
