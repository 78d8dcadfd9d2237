"""Multi-head latent attention (MLA): keys and values are projections of one small latent per token."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron_core.config import ModelConfig
from megatron_core.features.latent_attention.settings import LatentAttentionConfig
from megatron_core.ops.rotary import rope
from megatron_core.transformer.context import LayerContext, SequenceContext
from megatron_core.transformer.core_attention import CoreAttention
from megatron_core.transformer.down_projection import DownProjection
from megatron_core.transformer.recompute import outputs_dropped, recomputed


def query_factor(config: ModelConfig) -> float:
    """Return the factor on the queries; kernels divide scores by the square root of the number of query channels.

    It is softmax_scale * sqrt(query channels) if ``softmax_scale`` is set, else that of scaled rotary positions.
    """
    if config.softmax_scale is not None:
        latent = config.section(LatentAttentionConfig)
        return config.softmax_scale * math.sqrt(latent.qk_head_dim + latent.qk_pos_emb_head_dim)
    return config.rotary_score_factor


class LatentAttention(nn.Module):
    """x -> W_o attention, where each head has (R: rotary embedding of pairs of adjacent channels)

        query  [W_uq c_q; R(W_qr c_q)]    c_q = norm(W_dq x), or x without ``q_lora_rank``
        key    [W_uk c; R(W_kr x)]        c = norm(W_dkv x); the second part is the same for all heads
        value  W_uv c

    ``[s, b, h]`` -> the same shape (``[s/tp, b, h]`` with sequence parallelism). Latents are normalized if
    ``qk_layernorm`` is given. ``core_attention`` constructs the attention without weights.
    Source: DeepSeek-AI 2024 (arXiv 2405.04434), section 2.1; weights as in Megatron Core's ``MLASelfAttention``.
    """

    # The heads are split over the tensor-parallel ranks; the latents are replicated, because every head needs all of
    # their few channels. In generation the cache stores the latents, which are smaller than keys and values.
    # Layers of ``no_rope_freq`` do not rotate, and keep the split of the channels.

    fits_in_graph = True

    def __init__(
        self,
        context: LayerContext,
        layer_number: int,
        *,
        core_attention: Callable[[LayerContext, int], nn.Module] = CoreAttention,
        qk_layernorm: Callable[..., nn.Module] | None = None,
    ) -> None:
        super().__init__()
        config = context.config.section(LatentAttentionConfig)
        self.tp_group = context.tp_group
        heads = config.num_attention_heads
        q_rank = config.q_lora_rank
        self.rank = config.kv_lora_rank
        self.layer_number = layer_number
        self.heads = heads // self.tp_group.size()
        self.plain = config.qk_head_dim
        self.turned = config.qk_pos_emb_head_dim
        self.value = config.v_head_dim
        up = partial(context.column_linear, bias=False)
        norm = (
            nn.Identity if qk_layernorm is None else partial(qk_layernorm, context, epsilon=config.latent_norm_epsilon)
        )
        if q_rank is None:
            self.linear_q_proj = up(config.hidden_size, heads * (self.plain + self.turned))
        else:
            self.linear_q_down_proj = DownProjection(context, q_rank)
            self.q_layernorm = norm(q_rank, partial_grad=context.sequence_parallel)
            self.linear_q_up_proj = up(q_rank, heads * (self.plain + self.turned))
        self.linear_kv_down_proj = DownProjection(context, self.rank + self.turned)
        self.kv_layernorm = norm(self.rank, partial_grad=context.sequence_parallel)
        self.linear_kv_up_proj = up(self.rank, heads * (self.plain + self.value))
        self.core_attention = core_attention(context, layer_number)
        self.recompute_core = config.recomputes("core_attn")
        self.recompute_up = config.recomputes("mla_up_proj")
        self.linear_proj = context.output_linear(heads * self.value)
        self.has_query_latent = q_rank is not None
        self.sequence_parallel = context.sequence_parallel
        self.backend = config.kernel_backend
        self.has_rotary = config.has_rotary(layer_number)
        self.query_factor = query_factor(config)
        self.arithmetic = context.parallel.arithmetic

    def forward(self, hidden: Tensor, context: SequenceContext) -> tuple[Tensor, Tensor | None]:
        """Return (output, bias to add to the output, or None)."""
        assert context.rotary is not None, "the model computes the rotary table for every position_embedding_type"
        rotate: Callable[[Tensor], Tensor] = nn.Identity()
        if self.has_rotary:
            cos, sin = context.rotary
            rotate = partial(rope, cos=cos, sin=sin, interleaved=True, backend=self.backend)
        query_latent = self.q_layernorm(self.linear_q_down_proj(hidden)) if self.has_query_latent else hidden
        latent, shared_key = self._latent(hidden, rotate)
        # Scores are computed from latents: the products with W_uk and W_uv move to the query and the output
        # (``of_latents``), so that a step does not expand all earlier tokens.
        if context.cache is not None:
            query = self._query(query_latent, rotate)
            latents = torch.cat([latent, shared_key], dim=-1)
            inputs = self._core_inputs(hidden, query_latent)
            return self.linear_proj(self.attend_in_generation(context.cache, query, latents, context, *inputs))

        # Queries, keys and values of all heads are many times as large as the latents, from which backward computes
        # them again.
        def project_up() -> tuple[Tensor, Tensor, Tensor]:
            return self._query(query_latent, rotate), *self.key_and_value(latent, shared_key)

        attend = recomputed(self.core_attention) if self.recompute_core and self.training else self.core_attention
        heads = project_up()
        with outputs_dropped(heads, project_up, active=self.recompute_up and self.training):
            attended = attend(*heads, context, *self._core_inputs(hidden, query_latent))
        return self.linear_proj(attended)

    def attend_in_generation(
        self, cache: Any, query: Tensor, latents: Tensor, context: SequenceContext, *inputs: Tensor
    ) -> Tensor:
        """Store latents and shared keys of a step's tokens; return their attention ``[tokens, 1, heads * v]``."""
        (memory,) = cache.write(self.layer_number, latents)
        cached = cache.step.cached
        outputs = []
        if cached:
            outputs.append(self._attend_to_latents(cache, query[:cached, 0], memory))
        if cache.step.fresh:
            key, value = self.key_and_value(*latents[cached:].split([self.rank, self.turned], dim=-1))
            outputs.append(cache.attend_fresh(self.core_attention, query[cached:, 0], key[:, 0], value[:, 0]))
        return torch.cat(outputs)[:, None]

    def _attend_to_latents(self, cache: Any, query: Tensor, memory: Tensor) -> Tensor:
        """Compute the same attention without expanding the cached latents to keys and values.

        q (W_uk c) = (W_uk^T q) c, and W_uv is applied to the weighted sum of latents. Source: DeepSeek-AI 2024,
        appendix C.
        """
        query, up_value = self.of_latents(query)
        query = query * math.sqrt((self.rank + self.turned) / (self.plain + self.turned))
        out = cache.attend_cached(self.core_attention, query, memory, memory[..., : self.rank])
        return torch.einsum("sac,avc->sav", out.unflatten(-1, (self.heads, -1)), up_value).flatten(1)

    def _core_inputs(self, hidden: Tensor, query_latent: Tensor) -> tuple[Tensor, ...]:
        """Further inputs of the core attention, from the layer's input and the latent of the queries."""
        return ()

    def _query(self, latent: Tensor, rotate: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the queries ``[s, b, heads, d + r]``."""
        query, _ = (self.linear_q_up_proj if self.has_query_latent else self.linear_q_proj)(latent)
        plain, turned = query.unflatten(-1, (self.heads, -1)).split([self.plain, self.turned], dim=-1)
        query = torch.cat([plain, rotate(turned)], dim=-1)
        return query if self.query_factor == 1.0 else query * self.query_factor

    def _latent(self, hidden: Tensor, rotate: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Return the latent ``[s, b, rank]`` and the key part shared by all heads, ``[s, b, r]``.

        With sequence parallelism, the latent is this rank's part of the sequence.
        """
        latent, shared_key = self.linear_kv_down_proj(hidden).split([self.rank, self.turned], dim=-1)
        # Each rank uses the shared key part for its own heads, so its gradient is summed over ranks.
        gather = self.arithmetic.gather_shared
        shared_key = gather(shared_key, self.tp_group, sequence_parallel=self.sequence_parallel)
        return self.kv_layernorm(latent), rotate(shared_key)

    def key_and_value(self, latent: Tensor, shared_key: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys ``[s, b, heads, d + r]`` and values ``[s, b, heads, v]``."""
        up, _ = self.linear_kv_up_proj(latent)
        plain, value = up.unflatten(-1, (self.heads, -1)).split([self.plain, self.value], dim=-1)
        shared = self.arithmetic.repeat_for_heads(shared_key, self.heads, self.tp_group)
        return torch.cat([plain, shared], dim=-1), value

    def of_latents(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """Queries W_uk^T q of latents and shared keys, ``[tokens, heads, rank + r]``, and W_uv ``[heads, v, rank]``."""
        weight_up = self.linear_kv_up_proj.weight
        adapter = self.linear_kv_up_proj.adapter
        assert weight_up is not None, "the layer owns its weight"
        # The products are moved into the weight, so an adapter has to be merged with it.
        weight = weight_up if adapter is None else adapter.merged(weight_up)
        up_key, up_value = weight.unflatten(0, (self.heads, -1)).split([self.plain, self.value], dim=1)
        plain, turned = query.split([self.plain, self.turned], dim=-1)
        return torch.cat([torch.einsum("sad,adc->sac", plain, up_key), turned], dim=-1), up_value
