"""DeepSeek-V3: latent attention, and experts that are chosen in groups with a bias."""

from megatron_core.config import ModelConfig
from megatron_core.config.presets import DEEPSEEK_V3_LAYERS
from megatron_core.errors import CheckpointError
from megatron_core.models.hf.architecture import register
from megatron_core.models.hf.families.llama import LLAMA
from megatron_core.models.hf.rules import (
    COUNT_OR_ZERO,
    ROPE,
    WIDTH,
    Rule,
    Settings,
    refuse,
    rope_parameters,
    rope_type,
)
from megatron_core.models.hf.tensors import gate_and_up


def _layers(hf_config: Settings) -> Settings:
    """Check combinations of settings; the first layers have dense MLPs, the others routed and shared experts."""
    if not isinstance(shared := hf_config.get("n_shared_experts"), int) or shared < 1:
        refuse("n_shared_experts", shared, "deepseek_v3 models need 1 or more")
    if hf_config.get("head_dim", hf_config["qk_rope_head_dim"]) != hf_config["qk_rope_head_dim"]:
        refuse("head_dim", hf_config["head_dim"], f"supported is qk_rope_head_dim={hf_config['qk_rope_head_dim']}")
    rope = rope_parameters(hf_config)
    if rope.get("mscale_all_dim") and not (rope_type(rope) == "yarn" and rope.get("mscale")):
        refuse("mscale_all_dim", rope["mscale_all_dim"], "supported is rope_type=yarn with mscale")
    layers = hf_config["num_hidden_layers"]
    dense = min(hf_config.get("first_k_dense_replace", 3), layers)
    limits, k = hf_config["topk_group"] < hf_config["n_group"], hf_config["num_experts_per_tok"]
    if limits and k != 2 * hf_config["topk_group"]:
        raise CheckpointError(
            f"config.json says num_experts_per_tok={k} and topk_group={hf_config['topk_group']}; groups are chosen by "
            "their two best experts, which is supported for two experts from each group"
        )
    return {
        "moe_layer_freq": (0,) * dense + (1,) * (layers - dense),
        "moe_shared_expert_intermediate_size": shared * hf_config["moe_intermediate_size"],
    }


def _layers_json(config: ModelConfig) -> Settings:
    sparse, width = config.expert_layers, config.expert_ffn_size
    return {
        "first_k_dense_replace": sparse[0] if sparse else config.num_layers,
        "n_shared_experts": (config.moe_shared_expert_intermediate_size or 0) // width,
        "num_key_value_heads": config.num_attention_heads,
        "head_dim": config.qk_pos_emb_head_dim,
    }


MTP_LAYERS = ("num_nextn_predict_layers", "num_mtp_layers")
LAYER_TYPES = {
    "head_dim": WIDTH,
    **dict.fromkeys(("n_shared_experts", "first_k_dense_replace", *MTP_LAYERS), COUNT_OR_ZERO),
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
        "n_group": "moe_router_num_groups",
        "topk_group": "moe_router_group_topk",
        "routed_scaling_factor": "moe_router_topk_scaling_factor",
    },
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
    rules=(ROPE, Rule(_layers, _layers_json, {**LAYER_TYPES, "head_dim": WIDTH})),
    layer_tensors={
        **LLAMA.layer_tensors,
        "self_attention.linear_q_proj": "self_attn.q_proj",
        "self_attention.linear_q_down_proj": "self_attn.q_a_proj",
        "self_attention.q_layernorm": "self_attn.q_a_layernorm",
        "self_attention.linear_q_up_proj": "self_attn.q_b_proj",
        "self_attention.linear_kv_down_proj": "self_attn.kv_a_proj_with_mqa",
        "self_attention.kv_layernorm": "self_attn.kv_a_layernorm",
        "self_attention.linear_kv_up_proj": "self_attn.kv_b_proj",
        "mlp.router": "mlp.gate",
        "mlp.router.expert_bias": "mlp.gate.e_score_correction_bias",
        "mlp.experts.linear_fc1": gate_and_up("mlp.experts.{e}.gate_proj", "mlp.experts.{e}.up_proj"),
        "mlp.experts.linear_fc2": "mlp.experts.{e}.down_proj",
        "mlp.shared_experts.linear_fc1": gate_and_up("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
        "mlp.shared_experts.linear_fc2": "mlp.shared_experts.down_proj",
    },
    mtp_layer_keys=MTP_LAYERS,
)
