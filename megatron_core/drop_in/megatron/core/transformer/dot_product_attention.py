"""Attention without its projections."""

from typing import Any

from torch import Tensor, nn

from megatron.core.enums import AttnMaskType
from megatron.core.transformer.exported import ExportedModule
from megatron.core.transformer.layer_context import SampleNumbers
from megatron_core.errors import ConfigError
from megatron_core.transformer.context import LayerContext, SequenceContext
from megatron_core.transformer.core_attention import CoreAttention


class DotProductAttention(ExportedModule, CoreAttention):
    """softmax(scale q k^T) v over the heads of this rank.

    In a layer's specification it selects the engine's attention. Alone it attends within whole sequences, without
    context parallelism and packed documents.
    """

    stands_for = CoreAttention

    attn_mask_type = AttnMaskType.causal
    rate = 0.0
    scale: float | None = None

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str = "self",
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        nn.Module.__init__(self)  # in a model ``CoreAttention`` builds the module, and ``adopt`` changes its class
        if config.context_parallel_size > 1:
            raise ConfigError("DotProductAttention: context_parallel_size > 1 is not supported; use a TransformerLayer")
        if config.softmax_type != "vanilla":
            raise ConfigError(
                f"DotProductAttention: softmax_type={config.softmax_type} is not supported; use a TransformerLayer"
            )
        self.config, self.attn_mask_type, self.layer_number = config, attn_mask_type, layer_number
        self.rate = config.attention_dropout if attention_dropout is None else attention_dropout
        self.scale = config.softmax_scale if softmax_scale is None else softmax_scale

    def bind(self, config: Any, context: LayerContext, samples: SampleNumbers) -> None:
        """Bind the module; rate and scale default to those of the configuration."""
        super().bind(config, context, samples)
        self.rate, self.scale = (
            vars(self).get(name, default)
            for name, default in (("rate", config.attention_dropout), ("scale", config.softmax_scale))
        )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any = None,
        attn_mask_type: AttnMaskType | Tensor | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """``[s, b, heads, d]``, keys, values ``[t, b, groups, d]`` -> ``[s, b, heads d]``; the mask ``[b, 1, s, t]`` is
        True where a query must not see a key. torch's generator draws dropout, as in Megatron."""
        if isinstance(attention_mask, SequenceContext):
            sinks = attn_mask_type if isinstance(attn_mask_type, Tensor) else None
            return super().forward(query, key, value, attention_mask, sinks)
        if packed_seq_params is not None:
            raise ConfigError("DotProductAttention: packed_seq_params is not supported; use a TransformerLayer")
        kind = self.attn_mask_type if attn_mask_type is None else attn_mask_type
        bias: Tensor | None = attention_bias
        if attention_mask is not None:
            hidden = query.new_zeros(attention_mask.shape).masked_fill_(attention_mask, float("-inf"))
            bias = hidden if bias is None else bias + hidden
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        attended = nn.functional.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=bias,
            dropout_p=self.rate if self.training else 0.0,
            is_causal=bias is None and kind in (AttnMaskType.causal, AttnMaskType.padding_causal),
            scale=self.scale,
            enable_gqa=query.shape[2] != key.shape[2],
        )
        return attended.permute(2, 0, 1, 3).flatten(2)
