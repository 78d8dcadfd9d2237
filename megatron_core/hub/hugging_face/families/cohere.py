"""Cohere, the Command R models: attention and MLP in parallel with one norm, LayerNorm without biases, rotary positions
of adjacent channels. Cohere 2, Command R7B and Command A: windows in most layers, and positions only in these."""

from megatron_core.hub.hugging_face.architecture import variant
from megatron_core.hub.hugging_face.families.llama import LLAMA
from megatron_core.hub.hugging_face.rules import (
    ATTENTION_BIASES,
    ROPE,
    WINDOWS,
    WINDOWS_WITH_POSITIONS,
    KeyRule,
    Settings,
    norms_of_each_head,
)
from megatron_core.hub.hugging_face.tensors import of_each_head
from megatron_core.schema import COUNT

COHERE = variant(
    LLAMA,
    model_type="cohere",
    class_name="CohereForCausalLM",
    keys={"head_dim": None, "rms_norm_eps": None, "layer_norm_eps": "norm_epsilon", "logit_scale": "logit_multiplier"},
    fixed={
        "normalization": "LayerNorm",
        "disable_bias_layernorm": True,
        "parallel_residual": True,
        "parallel_residual_shared_norm": True,
        "rotary_interleaved": True,
    },
    defaults={"tie_word_embeddings": True, "logit_scale": 0.0625, "layer_norm_eps": 1e-5, "rope_theta": 5e5},
    required={"hidden_act": "silu"},
    rules=(ROPE, ATTENTION_BIASES, norms_of_each_head("use_qk_norm")),
    layer_tensors={
        "pre_mlp_layernorm": None,
        "self_attention.q_layernorm": of_each_head("self_attn.q_norm"),
        "self_attention.k_layernorm": of_each_head("self_attn.k_norm"),
    },
)


def _windows(hf_config: Settings) -> Settings:
    """Without ``sliding_window`` no layer has positions."""
    if hf_config.get("sliding_window") is not None:
        return WINDOWS_WITH_POSITIONS.read(hf_config)
    WINDOWS.read(hf_config)  # checks layer_types
    return {"no_rope_freq": (1,) * hf_config["num_hidden_layers"]}


COHERE2 = variant(
    COHERE,
    model_type="cohere2",
    class_name="Cohere2ForCausalLM",
    unread=frozenset({"layer_switch", "use_embedding_sharing", "use_parallel_embedding"}),
    keys={"head_dim": "kv_channels"},
    defaults={**COHERE.defaults, "sliding_window": 4096, "rope_theta": 1e4},
    required={
        "hidden_act": "silu",
        "use_parallel_block": True,
        "use_gated_activation": True,
        "position_embedding_type": "rope_gptj",
        "order_of_interleaved_layers": "local_attn_first",
    },
    rules=(
        ROPE,
        ATTENTION_BIASES,
        KeyRule(_windows, WINDOWS_WITH_POSITIONS.write, {**WINDOWS.types, "sliding_window_pattern": COUNT}),
    ),
    layer_tensors={"self_attention.k_layernorm": None},
)
