"""The shape of the transformer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_core.config import conditions as c
from megatron_core.config import ranges as r
from megatron_core.config.layer_settings import (
    WHOLE_BLOCK,
    ActivationConfig,
    LayerBlock,
    NormConfig,
    RecomputeConfig,
    RotaryConfig,
)
from megatron_core.config.setting import ALWAYS, Resume, given, section, setting
from megatron_core.feature import Extensible


@dataclass(frozen=True, kw_only=True)
@section(resume=Resume.FUNCTION)
class ModelConfig(NormConfig, RotaryConfig, ActivationConfig, RecomputeConfig, Extensible):
    """The model: sizes, norms, positions, activations, dropout and initialisation."""

    num_layers: int = setting(2, r.SMALL_COUNT, when=ALWAYS, resume=Resume.TENSORS, aliases="encoder_num_layers")
    """Number of transformer layers."""
    hidden_size: int = setting(64, r.SIZE, when=ALWAYS, resume=Resume.TENSORS)
    """Width of the residual stream."""
    num_attention_heads: int = setting(4, r.SIZE, when=ALWAYS)
    """Number of query heads."""
    ffn_hidden_size: int | None = setting(
        None, r.SIZE, when=c.DENSE_LAYER, resume=Resume.SHAPE, aliases="intermediate_size"
    )
    """Width of the MLP; default: 4 x --hidden-size, or with a gated activation 8/3 x --hidden-size, rounded down to a
    multiple of 64."""
    attention_kind: str = setting("grouped_query", when=ALWAYS)
    """Kind of attention in all layers: grouped_query, or a kind that a program registers
    (transformer.register_attention); --multi-latent-attention selects latent attention."""
    experimental_attention_variant: Literal["gated_delta_net", "kimi_delta_attention", "dsa"] | None = setting(
        None, when=ALWAYS, resume=Resume.TENSORS
    )
    """Kind of the layers of --linear-attention-freq. gated_delta_net: a short convolution and the gated delta rule
    (Yang et al. 2025, arXiv 2412.06464; Qwen3-Next). kimi_delta_attention: the same with a decay for each channel of a
    key (Kimi Team 2025, arXiv 2510.26692). Or dsa: in all layers, attention to the keys that an indexer selects
    (DeepSeek-V3.2). Default: attention in all layers."""
    kv_channels: int | None = setting(None, r.SIZE, when=c.NO_LATENT_ATTENTION, resume=Resume.SHAPE)
    """Width of one attention head; default: --hidden-size / --num-attention-heads."""
    group_query_attention: bool = setting(False, needs=c.NO_LATENT_ATTENTION)
    """Grouped-query attention: several query heads share a key and value head; with one group, multi-query."""
    num_query_groups: int | None = setting(
        None, r.COUNT, needs=given("group_query_attention"), aliases="num_key_value_heads"
    )
    """Number of key and value heads, with --group-query-attention."""
    max_position_embeddings: int | None = setting(None, r.SIZE, when=ALWAYS, resume=Resume.SHAPE)
    """Number of learned positions, the maximum sequence length; default: --seq-length."""
    position_embedding_type: Literal["learned_absolute", "rope", "alibi", "none"] = setting(
        "learned_absolute", when=ALWAYS
    )
    """Learned positions, rotary positions (Su et al. 2021), biases of scores that are linear in the distance (alibi:
    Press et al. 2022; BLOOM), or none."""
    attention_output_gate: bool = setting(False, needs=c.NO_LATENT_ATTENTION)
    """Multiply the output of attention, per channel, by a sigmoid of the layer's input (Qwen3-Next)."""
    disable_bias_linear: bool = setting(False, when=ALWAYS, resume=Resume.TENSORS)
    """No biases in the linear layers."""
    add_qkv_bias: bool = setting(
        False, needs=c.NO_LATENT_ATTENTION, when=given("disable_bias_linear"), resume=Resume.TENSORS
    )
    """Add a bias to the QKV projection even with --disable-bias-linear."""
    add_attention_output_bias: bool = setting(
        False, needs=c.NO_LATENT_ATTENTION, when=given("disable_bias_linear"), resume=Resume.TENSORS
    )
    """Add a bias to the output projection of attention even with --disable-bias-linear (Phi-3.5-MoE, Cohere)."""
    add_output_layer_bias: bool = setting(False, when=ALWAYS, resume=Resume.TENSORS)
    """Add a bias to the output layer (Phi); --logit-multiplier does not scale it."""
    parallel_residual: bool = setting(False, when=ALWAYS)
    """Apply attention and MLP to the same input and add both outputs (GPT-J, GPT-NeoX)."""
    parallel_residual_shared_norm: bool = setting(False, needs=given("parallel_residual"), resume=Resume.TENSORS)
    """With --parallel-residual: attention and MLP share one norm of their input (GPT-J, Phi-2, Falcon 7B, Cohere)."""
    untie_embeddings_and_output_weights: bool = setting(False, when=ALWAYS, resume=Resume.TENSORS)
    """Give the output layer its own weight instead of the word embedding's."""
    scale_embeddings: bool = setting(False, when=ALWAYS)
    """Multiply embeddings by sqrt(hidden_size) (Vaswani et al. 2017, section 3.4; Gemma)."""
    embedding_multiplier: float = setting(1.0, r.POSITIVE, when=ALWAYS)
    """Factor on the embeddings (Granite)."""
    residual_multiplier: float = setting(1.0, r.POSITIVE, when=ALWAYS)
    """Factor on the outputs of attention and MLP before they are added to the residual stream (Granite)."""
    fp32_residual_connection: bool = setting(False, needs=c.SIXTEEN_BITS, resume=Resume.REPORTED)
    """With --bf16 or --fp16: hold the residual stream between layers in float32. Norms read it in float32, outputs of
    attention and MLP are added to it in float32, and messages between pipeline stages have twice the bytes."""
    logit_multiplier: float = setting(1.0, r.POSITIVE, when=ALWAYS)
    """Factor on the logits (Granite, Cohere)."""
    softmax_scale: float | None = setting(None, r.POSITIVE, when=ALWAYS)
    """Factor on the products of queries and keys; default: 1 / sqrt(channels of a head)."""
    attn_logit_softcapping: float | None = setting(None, r.POSITIVE, when=ALWAYS)
    """Bound c of the scaled products of queries and keys: c tanh(score / c) (Gemma 2); on a CPU it selects the unfused
    attention; default: none."""
    softmax_type: Literal["vanilla", "off-by-one", "learnable"] = setting(
        "vanilla", needs=c.NO_LATENT_ATTENTION, resume=Resume.TENSORS
    )
    """Denominator of the attention weights. vanilla: the sum of exp(score) over keys. off-by-one: 1 is added (Miller
    2023). learnable: exp of a learned number of the head, an attention sink, is added (gpt-oss)."""
    final_logit_softcapping: float | None = setting(None, r.POSITIVE, when=ALWAYS)
    """Bound c of the logits: c tanh(logits / c) (Gemma 2); default: none."""
    hidden_dropout: float = setting(0.1, r.BELOW_1, when=ALWAYS, resume=Resume.REPORTED)
    """Dropout probability on the residual branches and the embedding."""
    attention_dropout: float = setting(0.1, r.BELOW_1, when=ALWAYS, resume=Resume.REPORTED)
    """Dropout probability on the attention weights; a value above 0 selects the slower, unfused attention in
    training."""
    attention_backend: Literal["auto", "unfused", "flex"] = setting("auto", when=ALWAYS, resume=Resume.FREE)
    """auto: torch's scaled_dot_product_attention, or a kernel for windows, bounded scores and packed documents.
    unfused: plain matrix products and a softmax. flex: torch's FlexAttention in all layers, only on GPUs."""
    apply_query_key_layer_scaling: bool = setting(False, when=c.UNFUSED_ATTENTION, resume=Resume.FREE)
    """Divide queries by the layer's number and multiply the scores by it: the same function, but products overflow less
    in float16. Only in the unfused attention, since fused kernels hold scores in float32."""
    window_size: tuple[int, int] | None = setting(None, when=c.WINDOWED_LAYER)
    """Sliding-window attention: number of tokens before (-1: all) and after (0, since the model is causal) a token to
    which it attends."""
    window_attn_skip_freq: tuple[int, ...] | None = setting(
        None, needs=c.WINDOW, when=c.WINDOWED_LAYER, is_refinement=True
    )
    """Layers without the window. One number n: every n-th layer has full attention. One number per layer: 1 window, 0
    full attention. Default: every layer has the window."""
    kernel_backend: Literal["auto", "native", "reference", "apex", "transformer_engine"] = setting(
        "auto", when=ALWAYS, resume=Resume.FREE
    )
    """Backend of fused operations. auto: native kernels if available for device and dtype, else reference. native: an
    error if not available. reference: PyTorch. apex, transformer_engine: the library's operations, and auto for the
    operations that it lacks. --layout-invariant chooses its matrix products itself."""
    init_method_std: float = setting(0.02, r.POSITIVE, when=ALWAYS, resume=Resume.INITIAL)
    """Standard deviation of initial weights; divided by sqrt(2 num_layers) if their output joins the residual stream,
    or with --hybrid-layer-pattern by sqrt(num_layers)."""
    embedding_init_method_std: float | None = setting(None, r.POSITIVE, when=ALWAYS, resume=Resume.INITIAL)
    """Standard deviation of initial embeddings and of a tied output layer; default: --init-method-std."""
    make_vocab_size_divisible_by: int = setting(128, r.SIZE, when=ALWAYS, resume=Resume.SHAPE)
    """Pad the vocabulary to a multiple of this times the TP size; padding rows are never used."""

    @property
    def norms_have_biases(self) -> bool:
        """Whether norms have biases."""
        return self.normalization == "LayerNorm" and not self.disable_bias_layernorm

    @property
    def ffn_size(self) -> int:
        """Width of the MLP after defaults."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        if self.gated_linear_unit:
            return max(int(self.hidden_size * 8 / 3 / 64) * 64, 64)
        return 4 * self.hidden_size

    # Which parts each layer has. A feature overrides these methods, and calls ``super()`` for the other layers.

    @property
    def added_layers(self) -> int:
        """Number of layers after the last one, which are as the last one: those of multi-token prediction."""
        return 0

    @property
    def distinct_added_layers(self) -> int:
        """Number of added layers with weights of their own."""
        return self.added_layers

    @property
    def parts_per_layer(self) -> int:
        """Parts of a layer whose outputs are added to the residual stream."""
        return 2

    @property
    def attention_name(self) -> str:
        """The name of the kind of attention in all layers."""
        return self.attention_kind

    @property
    def layers_differ_in_size(self) -> bool:
        """Whether some layers have sizes of their own."""
        return False

    @property
    def may_have_attention(self) -> bool:
        """Whether a layer may have attention."""
        return True

    @property
    def may_have_mlp(self) -> bool:
        """Whether a layer may have an MLP or experts."""
        return True

    def may_have_feed_forward(self, name: str) -> bool:
        """Whether a layer may have a feed-forward part of this kind."""
        return True

    @property
    def sizes_over_ranks(self) -> tuple[str, ...]:
        """Further settings with sizes that tensor parallelism must split evenly."""
        return ()

    def block_of(self, layer_number: int) -> LayerBlock:
        """The sizes of the parts of a layer (numbered from 0)."""
        return WHOLE_BLOCK

    def of_layer(self, layer_number: int) -> "ModelConfig":
        """The settings with the sizes of a layer (numbered from 0); ``self`` if all layers have the same."""
        return self

    def applications(self, layer_number: int) -> range:
        """The numbers under which a layer (numbered from 0) is applied: one, or several of a repeated layer."""
        return range(layer_number, layer_number + 1)

    def feed_forward_name(self, layer_number: int) -> str | None:
        """The kind of the feed-forward part of a layer (numbered from 0): "mlp", or a name in
        ``Feature.feed_forwards``; None: the layer has none."""
        return None if self.block_of(layer_number).mlp.no_op else "mlp"

    def has_mlp(self, layer_number: int) -> bool:
        """Whether a layer (numbered from 0) has an MLP, or another part in its place."""
        return self.feed_forward_name(layer_number) is not None

    def has_dense_mlp(self, layer_number: int) -> bool:
        """Whether a layer (numbered from 0) has an MLP."""
        return self.feed_forward_name(layer_number) == "mlp"

    @property
    def counting_layers(self) -> tuple[Sequence[int], int]:
        """Ascending numbers of the layers that count choices of tokens in a step, and how many numbers each counts."""
        return (), 1

    @property
    def head_size(self) -> int:
        """Channels of one head after defaults."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def width_ratio(self) -> float:
        """Width / width for which initial weights and learning rates were chosen."""
        return 1.0

    @property
    def hidden_init_std(self) -> float:
        """Standard deviation of initial hidden matrices whose output does not join the residual stream."""
        return self.init_method_std / self.width_ratio**0.5

    @property
    def attention_scale(self) -> float | None:
        """Factor on the products of queries and keys; None: 1 / sqrt(channels of a head)."""
        return self.softmax_scale

    @property
    def attention_steps(self) -> tuple[str, ...]:
        """Hooks: classes derived from ``transformer.context.AttentionStep``, for all layers."""
        return ()

    @property
    def bias_channels(self) -> int:
        """Channels that steps of attention append to each query and key head."""
        return 0

    @property
    def embedding_factor(self) -> float:
        """Factor on the embeddings of words and positions."""
        return self.embedding_multiplier

    @property
    def logit_factor(self) -> float:
        """Factor on the logits."""
        return self.logit_multiplier

    @property
    def draws_head_as_embedding(self) -> bool:
        """Whether the output layer has initial weights as an embedding."""
        return self.share_embeddings_and_output_weights

    @property
    def query_groups(self) -> int:
        """Number of key and value heads after defaults."""
        if not self.group_query_attention:
            return self.num_attention_heads
        return self.num_query_groups or 1

    @property
    def all_query_groups(self) -> set[int]:
        """The numbers of key and value heads of all layers."""
        return {self.of_layer(layer).query_groups for layer in range(self.num_layers)}

    @property
    def add_bias_linear(self) -> bool:
        """Whether linear layers have biases."""
        return not self.disable_bias_linear

    def window_of_layer(self, layer_number: int) -> tuple[int, int] | None:
        """The window of a layer (numbered from 0); None: full attention."""
        # Added layers are as the last one. As in Megatron-LM, every n-th layer is counted from 1.
        skip, layer_number = self.window_attn_skip_freq, min(layer_number, self.num_layers - 1)
        if skip is None or self.window_size is None:
            return self.window_size
        windowed = (layer_number + 1) % skip[0] != 0 if len(skip) == 1 else skip[layer_number] == 1
        return self.window_size if windowed else None

    def recurrence_of(self, layer_number: int) -> str | None:
        """The kind of the recurrence of a layer (numbered from 0); None: it has attention alone or no mixer."""
        return None

    def is_recurrent(self, layer_number: int) -> bool:
        """Whether a layer (numbered from 0) has a recurrence, with or without attention."""
        return self.recurrence_of(layer_number) is not None

    def has_mixer(self, layer_number: int) -> bool:
        """Whether a layer (numbered from 0) has attention, the linear layer that replaces it, or a recurrence."""
        return not self.block_of(layer_number).attention.no_op

    def has_attention(self, layer_number: int) -> bool:
        """Whether a layer (numbered from 0) has attention."""
        attention = self.block_of(layer_number).attention
        return not (attention.no_op or attention.linear or self.is_recurrent(layer_number))

    def chunk_of_layer(self, layer_number: int) -> int | None:
        """Tokens of a chunk within which a layer (numbered from 0) attends; None: whole documents."""
        # As in Llama 4: layers without positions see whole documents, and connect the chunks.
        return self.attention_chunk_size if self.has_rotary(layer_number) else None

    def has_rotary(self, layer_number: int) -> bool:
        """Whether a layer (numbered from 0) has rotary positions, if the model has any."""
        skip, layer_number = self.no_rope_freq, min(layer_number, self.num_layers - 1)
        if skip is None:
            return True
        return (layer_number + 1) % skip[0] != 0 if len(skip) == 1 else skip[layer_number] == 0

    @property
    def has_recurrence(self) -> bool:
        """Whether any layer has a recurrence."""
        return any(map(self.is_recurrent, range(self.num_layers)))

    @property
    def has_windows(self) -> bool:
        """Whether any layer has a window."""
        return any(self.window_of_layer(layer) is not None for layer in range(self.num_layers))

    @property
    def has_qkv_bias(self) -> bool:
        """Whether the QKV projection has a bias."""
        return self.add_bias_linear or self.add_qkv_bias

    @property
    def has_attention_output_bias(self) -> bool:
        """Whether the output projection of grouped-query attention has a bias."""
        return self.add_bias_linear or self.add_attention_output_bias

    @property
    def has_sinks(self) -> bool:
        """Whether the attention weights of a query may add up to less than 1."""
        return self.softmax_type != "vanilla"

    @property
    def fuses_output_layer_with_loss(self) -> bool:
        """Whether losses are computed without storing all logits."""
        return False

    @property
    def share_embeddings_and_output_weights(self) -> bool:
        """Whether the output layer uses the word embedding's weight."""
        return not self.untie_embeddings_and_output_weights

    @property
    def head_name(self) -> str:
        """The kind of the head of the last stage; features have others (``models.gpt.model.make_head``)."""
        return "vocabulary"

    @property
    def head_loss_names(self) -> tuple[str, ...]:
        """Names of the auxiliary losses that the head adds."""
        return ()

    def head_columns(self, vocabulary: int) -> int:
        """Number of outputs of the head on a rank that has ``vocabulary`` rows of the padded vocabulary."""
        return vocabulary

    def head_elements(self, vocabulary: int, *, tied: bool) -> int:
        """Number of elements of the head on such a rank; ``tied``: its weight is that of an embedding there."""
        return vocabulary * (self.hidden_size * (not tied) + self.add_output_layer_bias)

    @property
    def last_stage_embeds(self) -> bool:
        """Whether the last stage uses the word embedding's weight, to score or to embed tokens."""
        return self.share_embeddings_and_output_weights or self.added_layers > 0
