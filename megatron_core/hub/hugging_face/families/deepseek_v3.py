"""DeepSeek-V3: latent attention, and experts that are chosen in groups with a bias."""

from megatron_core.config import ModelConfig
from megatron_core.features.presets.published import DEEPSEEK_V3_LAYERS
from megatron_core.hub.hugging_face.architecture import register
from megatron_core.hub.hugging_face.families.llama import LLAMA
from megatron_core.hub.hugging_face.rules import (
    EXPERT_BIAS,
    EXPERT_MATRICES,
    GROUPS_BY_TWO,
    MTP_LAYERS,
    ROPE,
    SHARED_MATRICES,
    KeyRule,
    Settings,
    dense_first,
    refuse,
    rope_parameters,
    rope_type,
)
from megatron_core.hub.hugging_face.tensors import TensorSource
from megatron_core.schema import COUNT, WIDTH


def _check_positions(hf_config: Settings) -> Settings:
    """Refuse channels and scalings of rotary positions that latent attention does not have."""
    if hf_config.get("head_dim", hf_config["qk_rope_head_dim"]) != hf_config["qk_rope_head_dim"]:
        refuse("head_dim", hf_config["head_dim"], f"supported is qk_rope_head_dim={hf_config['qk_rope_head_dim']}")
    heads = hf_config["num_attention_heads"]
    if hf_config.get("num_key_value_heads", heads) != heads:
        refuse("num_key_value_heads", hf_config["num_key_value_heads"], f"supported is num_attention_heads={heads}")
    rope = rope_parameters(hf_config)
    if rope.get("mscale_all_dim") and not (rope_type(rope) == "yarn" and rope.get("mscale")):
        refuse("mscale_all_dim", rope["mscale_all_dim"], "supported is rope_type=yarn with mscale")
    return {}


def _heads_json(config: ModelConfig) -> Settings:
    return {"num_key_value_heads": config.num_attention_heads, "head_dim": config.qk_pos_emb_head_dim}


LATENT_POSITIONS = KeyRule(_check_positions, _heads_json, {"head_dim": WIDTH, "num_key_value_heads": COUNT})
LATENT_MATRICES: dict[str, str | TensorSource] = {
    **LLAMA.layer_tensors,
    "self_attention.linear_q_proj": "self_attn.q_proj",
    "self_attention.linear_q_down_proj": "self_attn.q_a_proj",
    "self_attention.q_layernorm": "self_attn.q_a_layernorm",
    "self_attention.linear_q_up_proj": "self_attn.q_b_proj",
    "self_attention.linear_kv_down_proj": "self_attn.kv_a_proj_with_mqa",
    "self_attention.kv_layernorm": "self_attn.kv_a_layernorm",
    "self_attention.linear_kv_up_proj": "self_attn.kv_b_proj",
}

DEEPSEEK_V3 = register(
    LLAMA,
    model_type="deepseek_v3",
    class_name="DeepseekV3ForCausalLM",
    keys={
        "num_hidden_layers": "num_layers",
        "hidden_size": "hidden_size",
        "num_attention_heads": "num_attention_heads",
        "intermediate_size": "ffn_hidden_size",
        "max_position_embeddings": "max_position_embeddings",
        "initializer_range": "init_method_std",
        "attention_dropout": "attention_dropout",
        "q_lora_rank": "q_lora_rank",
        "kv_lora_rank": "kv_lora_rank",
        "qk_nope_head_dim": "qk_head_dim",
        "qk_rope_head_dim": "qk_pos_emb_head_dim",
        "v_head_dim": "v_head_dim",
        "n_routed_experts": "num_experts",
        "num_experts_per_tok": "moe_router_topk",
        "moe_intermediate_size": "moe_ffn_hidden_size",
        "routed_scaling_factor": "moe_router_topk_scaling_factor",
    },
    defaults={"num_key_value_heads": 128},
    # The norms of the latents always have this epsilon, so that the others must have it, too.
    fixed={**DEEPSEEK_V3_LAYERS, "norm_epsilon": 1e-6},
    required={
        "hidden_act": "silu",
        "attention_bias": False,
        "rope_interleave": True,
        "norm_topk_prob": True,
        "rms_norm_eps": 1e-6,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
    },
    rules=(ROPE, LATENT_POSITIONS, dense_first(dense=3), GROUPS_BY_TWO),
    layer_tensors={**LATENT_MATRICES, **EXPERT_MATRICES, **EXPERT_BIAS, **SHARED_MATRICES},
    mtp_layer_keys=MTP_LAYERS,
)
