"""Settings of the parts of a layer: norms, activation, positions, recompute; sizes of parts."""

from dataclasses import dataclass, replace
from typing import Literal

from megatron_core.config import conditions as c
from megatron_core.config import ranges as r
from megatron_core.config.setting import ALWAYS, Resume, given, section, setting


class ResidualStream:
    """The hidden states that layers exchange. A feature overrides these methods."""

    hidden_size: int

    @property
    def layer_class(self) -> str:
        """Hook: the class of the layers, derived from the one named here."""
        return "megatron_core.transformer.block:TransformerLayer"

    @property
    def stream_size(self) -> int:
        """Channels of a token between layers, and in messages between pipeline stages."""
        return self.hidden_size

    @property
    def connection_elements(self) -> tuple[int, int]:
        """Elements of matrices, and of vectors, that connect attention or an MLP with the residual stream."""
        return 0, 0


@dataclass(frozen=True, kw_only=True)
@section(resume=Resume.FUNCTION)
class NormConfig(ResidualStream):
    """Type and places of norms."""

    normalization: Literal["LayerNorm", "RMSNorm"] = setting("LayerNorm", when=ALWAYS, resume=Resume.TENSORS)
    """Type of normalization."""
    disable_bias_layernorm: bool = setting(False, needs=c.LAYER_NORM, resume=Resume.TENSORS)
    """LayerNorm with weights, but without biases (Cohere)."""
    disable_weight_layernorm: bool = setting(False, needs=c.RMS_NORM, resume=Resume.TENSORS)
    """RMSNorm without weights, except for norms of queries and keys with --qk-layernorm (NanoChat)."""
    embedding_layernorm: bool = setting(False, when=ALWAYS, resume=Resume.TENSORS)
    """Normalize the embeddings before the first layer (NanoChat)."""
    apply_layernorm_1p: bool = setting(False, when=ALWAYS)
    """Store weights of norms minus one, so that they are small numbers around 0 (Gemma)."""
    norm_epsilon: float = setting(1e-5, r.POSITIVE, when=ALWAYS, aliases="layernorm_epsilon")
    """Added to the variance inside the normalization."""
    norm_placement: Literal["pre", "sandwich", "post"] = setting("pre", when=ALWAYS, resume=Resume.TENSORS)
    """Position of norms. pre: before attention and MLP. post: after them, before the residual sum (OLMo 2). sandwich:
    both (Gemma 2)."""
    qk_layernorm: bool = setting(False, when=ALWAYS, resume=Resume.TENSORS)
    """Normalize queries and keys, separately for each head."""
    qk_layernorm_over_heads: bool = setting(
        False, needs=c.NO_LATENT_ATTENTION, when=c.QK_LAYERNORM, resume=Resume.TENSORS
    )
    """With --qk-layernorm: normalize over all heads together (OLMo 2); needs RMSNorm."""
    qk_layernorm_weight_per_head: bool = setting(
        False, needs=(c.QK_LAYERNORM, c.NO_LATENT_ATTENTION), resume=Resume.TENSORS
    )
    """With --qk-layernorm: separate weights for each head, and no biases (Command R+)."""
    qk_layernorm_after_rotary: bool = setting(False, needs=(c.QK_LAYERNORM, c.NO_LATENT_ATTENTION))
    """With --qk-layernorm: normalize queries and keys after their rotation, not before (Hunyuan)."""
    qk_l2_norm: bool = setting(False, needs=c.NO_LATENT_ATTENTION)
    """Divide queries and keys of each head by their root mean square, without weights (Llama 4)."""
    qk_l2_norm_rotary_only: bool = setting(False, needs=given("qk_l2_norm"))
    """With --qk-l2-norm: only in layers with rotary positions."""
    apply_wd_to_qk_layernorm: bool = setting(False, needs=c.QK_LAYERNORM, resume=Resume.REPORTED, is_refinement=True)
    """With --qk-layernorm: apply weight decay to the weights of these norms."""


@dataclass(frozen=True, kw_only=True)
@section(resume=Resume.FUNCTION)
class ActivationConfig:
    """The function between the matrices of MLPs and experts; default: GELU."""

    swiglu: bool = setting(False, when=ALWAYS)
    """Gated MLP with SiLU: silu(gate) * up (Shazeer 2020)."""
    geglu: bool = setting(False, when=ALWAYS)
    """Gated MLP with GELU: gelu(gate) * up (Shazeer 2020)."""
    quick_geglu: bool = setting(False, when=ALWAYS)
    """Gated MLP with an approximation of GELU: gate * sigmoid(1.702 gate) * up (gpt-oss)."""
    glu_linear_offset: float = setting(0.0, r.NON_NEGATIVE, needs=c.GATED)
    """Offset o of a gated MLP: f(gate) * (up + o); 1 in gpt-oss."""
    activation_func_clamp_value: float | None = setting(None, r.POSITIVE, needs=c.GATED)
    """Bound v of a gated MLP: min(gate, v), and up between -v and v (gpt-oss); default: none."""
    mlp_multipliers: tuple[float, float] = setting((1.0, 1.0), needs=c.GATED, when=c.DENSE_LAYER)
    """Factors on the gates, before the activation function, and on the output of a gated MLP (Falcon-H1)."""
    squared_relu: bool = setting(False, when=ALWAYS)
    """MLP with relu(x)^2 (So et al. 2021)."""
    relu: bool = setting(False, when=ALWAYS)
    """MLP with relu(x) (OPT)."""
    xielu: bool = setting(False, needs=c.NO_EXPERTS, resume=Resume.TENSORS)
    """MLP with xIELU, which has two learned numbers in each layer (Huang and Schlag 2024; Apertus)."""
    openai_gelu: bool = setting(False, when=c.GELU)
    """Approximate GELU by tanh, as in GPT-2, also with --geglu; default: the exact GELU. Megatron-LM approximates by
    default in layers with biases."""

    @property
    def gated_linear_unit(self) -> bool:
        """Whether the MLP's first projection computes a gate and a value."""
        return self.swiglu or self.geglu or self.quick_geglu


@dataclass(frozen=True, kw_only=True)
@section(resume=Resume.FUNCTION)
class RotaryConfig:
    """Rotary positions (Su et al. 2021), and the optimizer of learned positions."""

    positions_as_matrices: bool = setting(False, when=c.OPTIMIZED_POSITIONS, resume=Resume.REPORTED)
    """Learned positions are hidden matrices for --decoupled-lr and optimizers of matrices, as in Megatron-LM, instead
    of embeddings."""
    rotary_base: float = setting(10000.0, r.POSITIVE, when=c.ROTARY, aliases="rotary_position_embeddings_theta")
    """Base of the rotary frequencies."""
    rotary_base_of_windows: float | None = setting(
        None, r.POSITIVE, needs=c.NO_LATENT_ATTENTION, when=(c.WINDOWED_LAYER, c.ROTARY, c.WINDOW)
    )
    """Base in layers with the window of --window-size, which is not scaled (Gemma 3); default: --rotary-base."""
    rotary_percent: float = setting(1.0, r.POSITIVE_UP_TO_1, when=c.ROTARY)
    """Fraction of each head's channels that have rotary positions."""
    no_rope_freq: tuple[int, ...] | None = setting(None, needs=c.ROTARY)
    """Layers without rotary positions (Llama 4, SmolLM3). One number n: every n-th layer. One number per layer: 1
    without, 0 with rotary positions; also an expression such as ([0]*3+[1])*12. Default: all layers have them."""
    attention_chunk_size: int | None = setting(None, r.SIZE, needs=(c.ROTARY, c.NO_LATENT_ATTENTION))
    """Layers with rotary positions attend within chunks of this number of tokens of a document (Llama 4); default:
    within whole documents."""
    rotary_interleaved: bool = setting(False, needs=c.NO_LATENT_ATTENTION, when=c.ROTARY)
    """Rotate channels 2i and 2i + 1 together (RoFormer, GPT-J); default: i and i + half (Llama)."""

    # A feature that scales rotary frequencies overrides these methods.

    @property
    def rotary_scaling(self) -> str | None:
        """Hook: a function with the arguments of ``transformer.rotary.rotary_frequencies``; None: no scaling."""
        return None

    @property
    def rotary_score_factor(self) -> float:
        """Factor on the scores of heads with the scaled magnitude in a part of their channels."""
        return 1.0

    @property
    def longest_text_scales_rotary(self) -> bool:
        """Whether the longest text of the run chooses the rotary frequencies."""
        return False


@dataclass(frozen=True)
class LayerPart:
    """The attention or the MLP of a layer."""

    no_op: bool = False
    """Whether the layer does not have it."""
    linear: bool = False
    """Whether a matrix ``[h, h]`` replaces it."""
    size: int | None = None
    """Number of key-value groups, or width of the MLP; None: that of the model."""

    def sized(self, size: int) -> "LayerPart":
        """The part with ``size``, if it has a size and none of its own."""
        return self if self.no_op or self.linear or self.size is not None else replace(self, size=size)


@dataclass(frozen=True)
class LayerBlock:
    """The parts of a layer."""

    attention: LayerPart = LayerPart()
    """Its attention; the size is the number of key-value groups."""
    mlp: LayerPart = LayerPart()
    """Its MLP; the size is the width."""

    @property
    def is_empty(self) -> bool:
        """Whether the layer returns its input."""
        return self.attention.no_op and self.mlp.no_op

    @property
    def has_sizes_of_model(self) -> bool:
        """Whether no part has a size of its own."""
        return self.attention.size is None and self.mlp.size is None

    def sized(self, groups: int, width: int) -> "LayerBlock":
        """The layer with the sizes of the model where it has none of its own."""
        return LayerBlock(self.attention.sized(groups), self.mlp.sized(width))


WHOLE_BLOCK = LayerBlock()
"""A layer with attention and an MLP of the sizes of the model."""


RecomputeModule = Literal["core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts"]


@dataclass(frozen=True, kw_only=True)
@section(resume=Resume.FREE)
class RecomputeConfig:
    """Activations that are not stored on the device between forward and backward."""

    recompute_granularity: Literal["full", "selective"] | None = setting(None, when=c.TRAINING)
    """Activations that backward recomputes. full: of whole layers. selective: of --recompute-modules."""
    recompute_modules: tuple[RecomputeModule, ...] = setting(
        ("core_attn",), needs=c.SELECTIVE_RECOMPUTE, is_refinement=True
    )
    """Parts of a layer for selective recompute. core_attn: attention without its projections. layernorm: norms before
    attention and MLP. mla_up_proj: queries, keys and values from their latents. mlp, moe, shared_experts: these
    modules as a whole. moe_act: the activation function of experts."""
    recompute_method: Literal["uniform", "block"] | None = setting(
        None, needs=c.FULL_RECOMPUTE, aliases="activations_checkpoint_method", is_refinement=True
    )
    """With full recompute. uniform: keep the input of every --recompute-num-layers layers. block: recompute the first
    --recompute-num-layers layers of each stage."""
    recompute_num_layers: int | None = setting(
        None,
        r.COUNT,
        needs=c.FULL_RECOMPUTE,
        aliases="activations_checkpoint_num_layers checkpoint_num_layers",
        is_refinement=True,
    )
    """uniform: number of layers between stored inputs. block: number of recomputed layers of each stage."""
    cpu_offloading: bool = setting(False, when=c.GPU)
    """Move activations to the host's memory between forward and backward; needs --cpu-offloading-num-layers."""
    cpu_offloading_num_layers: int = setting(0, r.COUNT_FROM_0, when=given("cpu_offloading"))
    """Number of first layers of each stage with offloaded activations (with full recompute: stored inputs)."""

    def recomputes(self, module: str) -> bool:
        """Whether backward recomputes ``module``, one of ``--recompute-modules``."""
        return self.recompute_granularity == "selective" and module in self.recompute_modules
