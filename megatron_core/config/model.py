"""The shape of the transformer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model: sizes, norms, positions, activations, dropout and initialisation."""

    num_layers: int = 2
    """Number of transformer layers."""
    hidden_size: int = 64
    """Width of the residual stream."""
    num_attention_heads: int = 4
    """Number of query heads."""
    ffn_hidden_size: int | None = None
    """Width of the MLP; default 4 x hidden_size, or with a gated activation 8/3 of it rounded down to 64."""
    kv_channels: int | None = None
    """Width of one attention head; default hidden_size / num_attention_heads."""
    group_query_attention: bool = False
    """Share each key and value head among several query heads (GQA; MQA with one group)."""
    num_query_groups: int | None = None
    """Number of key and value heads; needs --group-query-attention."""
    max_position_embeddings: int | None = None
    """Rows of the learned position table, and the longest sequence; default seq_length."""
    position_embedding_type: Literal["learned_absolute", "rope", "none"] = "learned_absolute"
    """Learned positions, rotary positions (Su et al. 2021), or none."""
    rotary_base: float = 10000.0
    """Base of the rotary frequencies."""
    rotary_percent: float = 1.0
    """Fraction of each head's channels that rotate."""
    rotary_interleaved: bool = False
    """Rotate channels 2i and 2i + 1 together, as RoFormer and GPT-J do; default i and i + half, as Llama does."""
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    """Kind of normalization."""
    norm_epsilon: float = 1e-5
    """Added to the variance inside the normalization."""
    qk_layernorm: bool = False
    """Normalize queries and keys, head by head."""
    swiglu: bool = False
    """Gated MLP with SiLU: silu(gate) * up (Shazeer 2020)."""
    geglu: bool = False
    """Gated MLP with GELU: gelu(gate) * up (Shazeer 2020)."""
    squared_relu: bool = False
    """MLP with relu(x)^2 (So et al. 2021)."""
    openai_gelu: bool = False
    """GELU in its tanh form, as in GPT-2; the default GELU is the exact one."""
    disable_bias_linear: bool = False
    """No biases in the linear layers."""
    add_qkv_bias: bool = False
    """A bias in the QKV projection even with --disable-bias-linear."""
    untie_embeddings_and_output_weights: bool = False
    """Give the output layer a weight of its own."""
    hidden_dropout: float = 0.1
    """Dropout probability on the residual branches and the embedding."""
    attention_dropout: float = 0.1
    """Dropout probability on the attention weights; any value above 0 takes the unfused path in training."""
    attention_backend: Literal["auto", "unfused"] = "auto"
    """auto: torch's scaled_dot_product_attention; unfused: plain matrix products and a softmax."""
    kernel_backend: Literal["auto", "native", "reference", "apex", "transformer_engine"] = "auto"
    """Body of the fused operations: auto takes the compiled one where there is one for the device and data type, native
    insists on it, reference takes PyTorch's own; apex and transformer_engine take what these libraries have, auto for
    the rest."""
    cross_entropy_loss_fusion: bool = False
    """Let --cross-entropy-fusion-impl say how the loss is computed; without it, it is native."""
    cross_entropy_fusion_impl: Literal["native", "linear"] = "native"
    """native: the loss in one pass over the logits; linear: together with the output layer, a few tokens at a time,
    so that the logits are never there as a whole, for one matrix product more. Needs --cross-entropy-loss-fusion."""
    init_method_std: float = 0.02
    """Standard deviation of initial weights; over sqrt(2 L) in layers that write the residual stream."""
    make_vocab_size_divisible_by: int = 128
    """The vocabulary is padded to a multiple of this times the TP size; no pad row is ever used."""
    recompute_granularity: Literal["full", "selective"] | None = None
    """What to compute again in backward instead of keeping: whole layers, or only the attention core."""
    recompute_method: Literal["uniform", "block"] | None = None
    """With full recompute: runs of recompute_num_layers layers (uniform), or each stage's first (block)."""
    recompute_num_layers: int | None = None
    """With uniform: layers in each recomputed run; with block: recomputed layers in each stage."""

    @property
    def gated_linear_unit(self) -> bool:
        """Whether the MLP's first projection yields a gate and a value."""
        return self.swiglu or self.geglu

    @property
    def ffn_size(self) -> int:
        """Width of the MLP after defaults."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        if self.gated_linear_unit:
            return max(int(self.hidden_size * 8 / 3 / 64) * 64, 64)
        return 4 * self.hidden_size

    @property
    def head_size(self) -> int:
        """Channels of one head after defaults."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def query_groups(self) -> int:
        """Number of key and value heads after defaults."""
        if not self.group_query_attention:
            return self.num_attention_heads
        return self.num_query_groups or 1

    @property
    def add_bias_linear(self) -> bool:
        """Whether linear layers have biases."""
        return not self.disable_bias_linear

    @property
    def has_qkv_bias(self) -> bool:
        """Whether the QKV projection has a bias."""
        return self.add_bias_linear or self.add_qkv_bias

    @property
    def fuses_output_layer_with_loss(self) -> bool:
        """Whether losses are computed without whole logits."""
        return self.cross_entropy_loss_fusion and self.cross_entropy_fusion_impl == "linear"

    @property
    def share_embeddings_and_output_weights(self) -> bool:
        """Whether the output layer uses the word embedding's weight."""
        return not self.untie_embeddings_and_output_weights
