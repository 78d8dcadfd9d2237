"""Self-attention with heads split over the tensor-parallel ranks."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from torch import Tensor, nn

from megatron_core.feature import load_hook
from megatron_core.ops.rotary import rope
from megatron_core.parallel.sharding import allocate, split, split_qkv
from megatron_core.transformer.context import LayerContext, SequenceContext
from megatron_core.transformer.core_attention import CoreAttention
from megatron_core.transformer.recompute import recomputed


class SelfAttention(nn.Module):
    """x -> W_o attention(W_q x, W_k x, W_v x), ``[s, b, h]`` -> the same shape.

    With sequence parallelism the shape is ``[s/tp, b, h]``. With ``attention_output_gate`` attention(...) becomes
    attention(...) * sigmoid(g) for gate heads g. ``core_attention`` constructs the attention without weights;
    ``qk_layernorm`` constructs the norms of each head's queries and keys. ``softmax_offset`` ``[heads]`` are the sinks
    of ``softmax_type='learnable'``; those of 'off-by-one' are 0.
    """

    # One matrix for all projections: one product, and with sequence parallelism one gather of the input. It holds, for
    # each group, the query heads, the gate heads, the key head and the value head. This is Megatron's order: a split of
    # the rows over ranks then splits each of the parts by groups, and checkpoints carry over.
    # With fewer key-value groups than ranks, the key and value of a group are replicated over its ranks: each needs
    # them for its own query heads.

    is_joinable = True
    """See ``transformer.joined``."""
    fits_in_graph = True
    """Whether ``torch.compile`` can trace it with its layer."""

    def __init__(
        self,
        context: LayerContext,
        layer_number: int,
        *,
        core_attention: Callable[[LayerContext, int], nn.Module] = CoreAttention,
        qk_layernorm: Callable[..., nn.Module] | None = None,
    ) -> None:
        super().__init__()
        config = context.config
        size = context.tp_group.size()
        d = config.head_size
        # Heads and groups of this rank.
        self.layer_number = layer_number
        self.heads = config.num_attention_heads // size
        # The projection repeats keys and values for each part whose gradients are separate addends.
        self.groups = max(config.query_groups // size, context.parallel.arithmetic.parts_on(context.tp_group))
        self.head_size = d
        self.gated = config.attention_output_gate
        # The fused projection to queries, gates, keys and values.
        self.linear_qkv = context.column_linear(
            config.hidden_size,
            (config.num_attention_heads * (1 + self.gated) + 2 * config.query_groups) * d,
            bias=config.has_qkv_bias,
            spec=partial(
                split_qkv,
                heads=config.num_attention_heads,
                groups=config.query_groups,
                head_size=d,
            ),
        )
        # Each rank normalizes only its own heads, so these gradients are partial with and without sequence parallelism.
        head_norm = nn.Identity if qk_layernorm is None else partial(qk_layernorm, context, d, partial_grad=True)
        self.q_layernorm = head_norm(heads=config.num_attention_heads)
        self.k_layernorm = head_norm(heads=config.query_groups)
        if config.apply_wd_to_qk_layernorm:
            for parameter in (self.q_layernorm.weight, self.k_layernorm.weight):
                assert isinstance(parameter, nn.Parameter), "validated: there are norms"
                parameter.decays = True
        # Attention, output projection and settings of ``forward``.
        self.softmax_offset = None
        if config.softmax_type == "learnable":
            sinks = split((config.num_attention_heads,), 0, context.tp_group.rank(), size)
            self.softmax_offset = allocate(sinks, context.parallel.params_dtype, context.parallel.device)
            self.softmax_offset.init_method = context.init_method
        self.has_sinks = config.has_sinks
        self.core_attention = core_attention(context, layer_number)
        self.recompute_core = config.recomputes("core_attn")
        self.linear_proj = context.output_linear(config.num_attention_heads * d, bias=config.has_attention_output_bias)
        self.backend = config.kernel_backend
        self.rotary_interleaved = config.rotary_interleaved
        self.has_head_norms = qk_layernorm is not None
        self.keeps_projection = self.gated or qk_layernorm is not None  # autograd saves the projection in any case
        windowed = config.window_of_layer(layer_number) is not None
        self.has_rotary = config.has_rotary(layer_number)
        self.norms_rotated = config.qk_layernorm_after_rotary
        self.has_chunks = config.chunk_of_layer(layer_number) is not None
        self.other_rotary = windowed and config.rotary_base_of_windows is not None
        self.steps = [load_hook(step)(context, layer_number) for step in config.attention_steps]
        # Kernels divide by the root of all channels, also of those that a step appends; any other scale is applied to
        # the queries, which works with every kernel.
        self.bias_channels = config.bias_channels
        scale = d**-0.5 if self.bias_channels and config.attention_scale is None else config.attention_scale
        self.query_factor = None if scale is None else scale * math.sqrt(d + self.bias_channels)

    def forward(self, hidden: Tensor, context: SequenceContext) -> tuple[Tensor, Tensor | None]:
        """Return (output, bias to add to the output, or None)."""
        return self.linear_proj(self.attend(hidden, context))

    def attend(self, hidden: Tensor, context: SequenceContext) -> Tensor:
        """Return the input of the output projection, ``[s, b, heads * d]`` for the heads of this rank.

        In generation, the cache provides the keys and values of earlier positions.
        """
        query, gate, key, value = self._query_key_value(hidden)
        if self.has_head_norms and not self.norms_rotated:
            query = self.q_layernorm(query)
            key = self.k_layernorm(key)
        copies = self.bias_channels > 0
        rotary = context.rotary_of_windows if self.other_rotary else context.rotary
        if rotary is not None and self.has_rotary:
            cos, sin = rotary
            query = rope(query, cos, sin, interleaved=self.rotary_interleaved, backend=self.backend)
            key = rope(key, cos, sin, interleaved=self.rotary_interleaved, backend=self.backend)
            copies = True
        if self.has_head_norms and self.norms_rotated:
            query = self.q_layernorm(query)
            key = self.k_layernorm(key)
        if self.query_factor is not None:
            query = query * self.query_factor
        query = query.flatten(2, 3)
        for step, of_positions in zip(self.steps, context.for_steps, strict=True):
            query, key = step(query, key, of_positions)
        if copies and self.training and not self.keeps_projection:
            value = value.clone()  # a view would keep the projection's queries and keys alive
        if self.has_chunks:
            context = replace(context, documents=context.chunks)
        if context.cache is None:
            attend = recomputed(self.core_attention) if self.recompute_core and self.training else self.core_attention
            attended = attend(query, key, value, context, *self._sinks(query))
        else:
            heads = query[:, 0], key[:, 0], value[:, 0], *self._sinks(query)
            attended = context.cache.attend(self, *heads)[:, None]
        return attended if gate is None else attended * gate.flatten(2).sigmoid()

    def _sinks(self, query: Tensor) -> tuple[Tensor, ...]:
        """The argument ``sinks`` of the core attention, if there are sinks."""
        if not self.has_sinks:
            return ()
        return (query.new_zeros(self.heads) if self.softmax_offset is None else self.softmax_offset,)

    def _query_key_value(self, hidden: Tensor) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """Return query, gate, key and value as views of one tensor, before norms and rotation.

        Query and gate (None without gates) are ``[s, b, groups, heads per group, d]``; key and value are
        ``[s, b, groups, d]``.
        """
        mixed, _ = self.linear_qkv(hidden)
        queries = self.heads // self.groups
        gates = queries * self.gated
        mixed = mixed.unflatten(-1, (self.groups, queries + gates + 2, self.head_size))
        # Without an empty part for absent gates: backward would allocate its gradient.
        query, *gate, key, value = mixed.split([queries, *([gates] if gates else []), 1, 1], dim=-2)
        return query, gate[0] if gate else None, key.squeeze(-2), value.squeeze(-2)
