"""Norms: those of layers, and those of queries and keys."""

from dataclasses import dataclass
from typing import Literal

from megatron_core.config import conditions as c
from megatron_core.config import ranges as r
from megatron_core.config.setting import ALWAYS, Resume, given, section, setting


@dataclass(frozen=True, kw_only=True)
@section(resume=Resume.FUNCTION)
class NormConfig:
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
