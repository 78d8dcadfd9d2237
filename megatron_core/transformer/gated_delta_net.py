"""Gated delta nets: layers with a state of fixed size per head instead of attention over all earlier tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron_core.config import mixers as kinds
from megatron_core.context_parallel.states import StateExchange
from megatron_core.errors import LayoutError
from megatron_core.ops import rms_norm
from megatron_core.ops.delta_rule import chunked_delta_rule, delta_rule_by_steps
from megatron_core.ops.rows import wide
from megatron_core.parallel.sharding import allocate, replicated, split, split_fused
from megatron_core.tensor_parallel import ColumnParallelLinear
from megatron_core.transformer.context import LayerContext, SequenceContext
from megatron_core.transformer.latent_attention import DownProjection
from megatron_core.transformer.paged_attention import KeyValueStore
from megatron_core.transformer.recompute import recomputed

DECAYS = (1.0, 16.0)
"""Range of initial decay rates, as in Megatron Core."""
NORM_EPSILON = 1e-6
"""Added to the squared norms of queries and keys (Qwen3-Next)."""


def log_of_decay_rates(tensor: Tensor) -> Tensor:
    """Fill with the logarithms of numbers drawn evenly from ``DECAYS``."""
    return tensor.uniform_(*DECAYS).log_()


class Convolution(nn.Module):
    """Depthwise causal convolution: y_t = silu(sum over j of w_j x_(t-j)), over the tokens of a document.

    The channels are those of this rank's queries, keys and values; the weight is ``[channels, 1, width]``, as that of
    ``torch.nn.Conv1d``.
    """

    def __init__(self, context: LayerContext, pieces: tuple[int, ...], width: int) -> None:
        super().__init__()
        spec = split_fused((sum(pieces), 1, width), pieces, context.tp_group.rank(), context.tp_group.size())
        self.weight = allocate(spec, context.parallel.params_dtype, context.parallel.device)
        self.weight.init_method = partial(nn.init.uniform_, a=-1 / math.sqrt(width), b=1 / math.sqrt(width))
        self.weight.is_vector = self.weight.decays = True  # no matrix, so that Muon does not take it for one
        self.width = width

    def forward(self, window: Tensor, ages: Tensor | None) -> Tensor:
        """``[b, width - 1 + n, c]``, the earlier tokens first -> ``[b, n, c]``.

        ``ages`` ``[b, n]``: the number of tokens of the same document before each token; None: all have enough.
        """
        if ages is None:
            found = nn.functional.conv1d(window.mT, self.weight, groups=window.shape[2]).mT
        else:
            count, taps = ages.shape[1], self.weight[:, 0].unbind(-1)
            found = window.new_zeros(len(window), count, window.shape[2])
            for at, tap in enumerate(taps):
                visible = ages >= self.width - 1 - at
                found = found + (window[:, at : at + count] * tap).masked_fill(~visible.unsqueeze(-1), 0.0)
        return nn.functional.silu(found)


class GatedDeltaNet(nn.Module):
    """x -> W_o (norm(o) * silu(z)), where o are the outputs of the gated delta rule (``ops.delta_rule``)

        q, k, v   convolution of W x, with q and k of length 1
        decay     g = -e^A softplus(a + c), with a = W_a x
        rate      sigmoid(W_b x)
        gate      z = W_z x

    ``[s, b, h]`` -> the same shape (``[s/tp, b, h]`` with sequence parallelism). The heads are split over the
    tensor-parallel ranks; with context parallelism the states are passed between the ranks of ``context.cp``. Each
    query and key head serves several adjacent value heads, each with its own state ``[dk, dv]``. In generation, the
    cache stores the states and the last inputs of the convolution.
    Source: Yang et al. 2025 (arXiv 2412.06464); names and order of the weights as in Megatron Core's ``GatedDeltaNet``;
    the norm of outputs does not depend on ``apply_layernorm_1p``, as in Qwen3-Next.
    """

    kind: type[kinds.GatedDeltaNet] = kinds.GatedDeltaNet
    gate_activation: Callable[[Tensor], Tensor] = staticmethod(nn.functional.silu)

    def __init__(self, context: LayerContext, layer_number: int, **_: Any) -> None:
        super().__init__()
        config, parallel, group = context.config, context.parallel, context.tp_group
        sizes, size = self.kind(config), group.size()
        self.layer_number, self.epsilon, self.backend = layer_number, config.norm_epsilon, config.kernel_backend
        self.keys, self.values = config.linear_key_head_dim, config.linear_value_head_dim
        self.shared = config.linear_num_value_heads // config.linear_num_key_heads
        pieces = sizes.pieces
        self._make_projections(context, pieces)
        self.conv1d = Convolution(context, pieces[:3], config.linear_conv_kernel_dim)
        heads = [split((count,), 0, group.rank(), size) for count in (config.linear_num_value_heads, pieces[5])]
        self.A_log, self.dt_bias = (allocate(spec, parallel.params_dtype, parallel.device) for spec in heads)
        self.A_log.init_method, self.dt_bias.init_method = log_of_decay_rates, nn.init.ones_
        # Each rank normalizes only its own heads.
        norm = replicated((self.values,), group.rank(), partial_grad=True)
        self.out_norm = allocate(norm, parallel.params_dtype, parallel.device)
        self.out_norm.init_method = nn.init.ones_
        self.out_proj = context.output_linear(pieces[3], bias=False)
        self.convolved = sizes.convolved // size
        self.pieces = [piece // size for piece in pieces]
        self.exchange = StateExchange(context.cp.whole)
        self.recompute_core = config.recomputes("core_attn")

    def forward(self, hidden: Tensor, context: SequenceContext) -> tuple[Tensor, Tensor | None]:
        """Return (output, None)."""
        mixed = self._projected(hidden)
        if context.cache is not None:
            return self.out_proj(self._mix_with_cache(mixed[:, 0], context.cache)[:, None])
        mix = recomputed(self._mix) if self.recompute_core and self.training else self._mix
        return self.out_proj(mix(mixed, context))

    def _make_projections(self, context: LayerContext, pieces: tuple[int, ...]) -> None:
        self.in_proj = _fused_linear(context, pieces)

    def _projected(self, hidden: Tensor) -> Tensor:
        """Return this rank's queries, keys, values, gates, rates and decays, ``[s, b, c]``."""
        mixed, _ = self.in_proj(hidden)
        return mixed

    def _decays(self, x: Tensor) -> Tensor:
        """Logarithms of the decays ``[b, n, heads]``, or ``[b, n, heads, dk]``, from their projections."""
        return -self.A_log.to(x.dtype).exp() * nn.functional.softplus(x + self.dt_bias.to(x.dtype))

    def _mix(self, mixed: Tensor, context: SequenceContext) -> Tensor:
        """Projections ``[s, b, c]`` of whole sequences, or of this rank's parts -> ``[s, b, heads * dv]``."""
        if context.attention_mask is not None:
            raise LayoutError(
                f"an attention mask cannot be used with experimental_attention_variant={self.kind.name}, whose states "
                "hold all earlier tokens; give document_lengths instead"
            )
        exchange, ages = self.exchange, self._ages(mixed, context)
        own = mixed.unflatten(0, (exchange.parts, -1)).transpose(1, 2).flatten(0, 1)  # [parts b, n, c]
        convolved, rest = own.split([self.convolved, own.shape[-1] - self.convolved], dim=-1)
        before = exchange.tokens_before(convolved, self.conv1d.width - 1)
        convolved = self.conv1d(torch.cat([before, convolved], dim=1), ages)

        def recur(convolved: Tensor, rest: Tensor) -> Tensor:
            first, state_after = None if ages is None else ages == 0, None
            if exchange.parts > 1:
                state_after = exchange.state_before
            outputs, _ = chunked_delta_rule(*self._heads(convolved, rest), first=first, state_after=state_after)
            return outputs.to(mixed.dtype)

        # Backward computes the recurrence again: its products of chunks would be 5 to 10 times as large as its inputs.
        outputs = (recomputed(recur) if self.training else recur)(convolved, rest)
        outputs = self._gated(outputs, rest)
        return outputs.unflatten(0, (exchange.parts, -1)).transpose(1, 2).flatten(0, 1)

    def _ages(self, mixed: Tensor, context: SequenceContext) -> Tensor | None:
        """Number of tokens of its document before each token, ``[parts b, n]``; None without documents."""
        if context.documents is None:
            return None
        ages = context.documents.ages
        if context.positions is not None:
            ages = ages[:, context.positions]
        return ages.unflatten(1, (self.exchange.parts, -1)).transpose(0, 1).flatten(0, 1)

    def _heads(self, convolved: Tensor, rest: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return query, key, value, decay and rate of each head, at least in float32."""
        dtype = wide(convolved.dtype)
        query, key, value = convolved.to(dtype).split(self.pieces[:3], dim=-1)
        query, key = (self._normed(x.unflatten(-1, (-1, self.keys))) for x in (query, key))
        _, rate, decay = rest.split(self.pieces[3:], dim=-1)
        value = value.unflatten(-1, (-1, self.values))
        return query * self.keys**-0.5, key, value, self._decays(decay.to(dtype)), rate.to(dtype).sigmoid()

    def _normed(self, x: Tensor) -> Tensor:
        """Heads of length 1, repeated for the value heads that share them."""
        x = x * (x.square().sum(-1, keepdim=True) + NORM_EPSILON).rsqrt()
        return x.repeat_interleave(self.shared, dim=-2)

    def _gated(self, outputs: Tensor, rest: Tensor) -> Tensor:
        """Norm of each head's output, times its activated gate; ``[..., heads, dv]`` -> ``[..., heads * dv]``."""
        gate = rest[..., : self.pieces[3]].unflatten(-1, (-1, self.values))
        normed = rms_norm(outputs, self.out_norm, self.epsilon, backend=self.backend)
        return (normed * self.gate_activation(gate)).flatten(-2)

    def _mix_with_cache(self, mixed: Tensor, cache: KeyValueStore) -> Tensor:
        """Update the states of the texts of a step with its tokens ``[tokens, c]``; return ``[tokens, heads * dv]``."""
        step, width = cache.step, self.conv1d.width - 1
        shapes = ((width, self.convolved), mixed.dtype), (self._state_shape, wide(mixed.dtype))
        tails, states = cache.states(self.layer_number, *shapes)
        convolved, rest = mixed.split([self.convolved, mixed.shape[-1] - self.convolved], dim=-1)
        outputs = []

        def advance(first: int, texts: Tensor, count: int, *, begins: Tensor | None) -> None:
            rows = slice(first, first + len(texts) * count)
            before, state = tails[texts], states[texts]
            if begins is not None:
                before = before.masked_fill(begins[:, None, None], 0.0)
                state = state.masked_fill(begins[:, None, None, None], 0.0)
            window = torch.cat([before, convolved[rows].unflatten(0, (-1, count))], dim=1)
            own = rest[rows].unflatten(0, (-1, count))
            rule = delta_rule_by_steps if count == 1 else chunked_delta_rule
            output, state = rule(*self._heads(self.conv1d(window, None), own), state=state)
            tails.index_copy_(0, texts, window[:, window.shape[1] - width :])
            states.index_copy_(0, texts, state)
            outputs.append(self._gated(output.to(own.dtype), own).flatten(0, 1))

        singles = len(step.lengths)
        if singles:
            begins = step.lengths == 1 if step.shortest == 1 else None
            advance(0, step.texts[:singles], 1, begins=begins)
        at = singles
        for number, count in enumerate((*(chunk.count for chunk in step.chunks), *step.fresh), start=singles):
            is_fresh = number >= singles + len(step.chunks)
            texts = step.texts[number : number + 1]
            advance(at, texts, count, begins=torch.ones_like(texts, dtype=torch.bool) if is_fresh else None)
            at += count
        return torch.cat(outputs)

    @property
    def _state_shape(self) -> tuple[int, int, int]:
        return self.pieces[3] // self.values, self.keys, self.values


class KimiDeltaAttention(GatedDeltaNet):
    """``GatedDeltaNet`` with a decay for each key channel, and with gates and decays that are projections of few
    channels:

        decay     g = -e^A softplus(W_fb W_fa x + c), for each key channel of a head
        gate      the norm of o is multiplied by sigmoid(W_gb W_ga x)

    W_fa and W_ga are replicated over the tensor-parallel ranks.
    Source: Kimi Team 2025 (arXiv 2510.26692), section 3.
    """

    kind = kinds.KimiDelta
    gate_activation = staticmethod(torch.sigmoid)

    def _make_projections(self, context: LayerContext, pieces: tuple[int, ...]) -> None:
        rank = kinds.KimiDelta(context.config).rank
        self.in_proj = _fused_linear(context, (*pieces[:3], pieces[4]))
        self.f_a_proj, self.g_a_proj = DownProjection(context, rank), DownProjection(context, rank)
        self.f_b_proj = context.column_linear(rank, pieces[5], bias=False)
        self.g_b_proj = context.column_linear(rank, pieces[3], bias=False)

    def _projected(self, hidden: Tensor) -> Tensor:
        mixed, _ = self.in_proj(hidden)
        convolved, rates = mixed.split([self.convolved, self.pieces[4]], dim=-1)
        gates, _ = self.g_b_proj(self.g_a_proj(hidden))
        decays, _ = self.f_b_proj(self.f_a_proj(hidden))
        return torch.cat([convolved, gates, rates, decays], dim=-1)

    def _decays(self, x: Tensor) -> Tensor:
        own = nn.functional.softplus(x + self.dt_bias.to(x.dtype)).unflatten(-1, (-1, self.keys))
        return -self.A_log.to(x.dtype).exp().unsqueeze(-1) * own


def _fused_linear(context: LayerContext, pieces: tuple[int, ...]) -> ColumnParallelLinear:
    """A projection to several pieces, of each of which every rank has its part."""
    return context.column_linear(
        context.config.hidden_size,
        sum(pieces),
        bias=False,
        spec=lambda shape, index, size: split_fused(shape, pieces, index, size),
    )
