"""Hunyuan: Llama with norms of queries and keys after their rotation; with experts and a shared one, too."""

from megatron_core.config import ModelConfig
from megatron_core.hub.hugging_face.architecture import variant
from megatron_core.hub.hugging_face.families.llama import LLAMA
from megatron_core.hub.hugging_face.rules import (
    ATTENTION_BIASES,
    EXPERT_MATRICES,
    ROPE,
    KeyRule,
    Settings,
    refuse,
    rope_parameters,
    rope_type,
)
from megatron_core.hub.hugging_face.tensors import gate_and_up
from megatron_core.schema import COUNT, COUNTS, POSITIVE, KeyType


def _positions(hf_config: Settings) -> Settings:
    """With ``alpha``, the positions called dynamic have the base rope_theta * alpha^(d / (d - 2)) at every length."""
    rope = rope_parameters(hf_config)
    if rope_type(rope) != "dynamic" or not rope.get("alpha"):
        return ROPE.read(hf_config)
    channels = hf_config.get("head_dim") or hf_config["hidden_size"] // hf_config["num_attention_heads"]
    plain = ROPE.read({**hf_config, "rope_scaling": None, "rope_parameters": {**rope, "rope_type": "default"}})
    return {**plain, "rotary_base": plain["rotary_base"] * rope["alpha"] ** (channels / (channels - 2))}


HUNYUAN = variant(
    LLAMA,
    model_type="hunyuan_v1_dense",
    class_name="HunYuanDenseV1ForCausalLM",
    fixed={"qk_layernorm": True, "qk_layernorm_after_rotary": True},
    aliases={"attention_head_dim": "head_dim"},
    # Keys of published files that transformers does not read.
    required={"hidden_act": "silu", "mlp_bias": False, "use_qk_norm": True, "use_cla": False, "norm_type": "rms"},
    rules=(KeyRule(_positions, ROPE.write, {**ROPE.types, "alpha": POSITIVE}), ATTENTION_BIASES),
    layer_tensors={
        "self_attention.q_layernorm": "self_attn.query_layernorm",
        "self_attention.k_layernorm": "self_attn.key_layernorm",
    },
)


def _experts(hf_config: Settings) -> Settings:
    """Every layer chooses ``moe_topk`` experts, one number or a list; a shared one has their width."""
    chosen = hf_config["moe_topk"]
    numbers = set(chosen) if isinstance(chosen, list) else {chosen}
    if len(numbers) != 1:
        refuse("moe_topk", chosen, "the same number for all layers is supported")
    return {
        "moe_router_topk": min(numbers),
        "moe_shared_expert_intermediate_size": hf_config["intermediate_size"],
    }


def _experts_json(config: ModelConfig) -> Settings:
    return {"moe_topk": config.moe_router_topk}


COUNT_OR_COUNTS = KeyType(f"{COUNT.description}, or a list of them", lambda x: COUNT.accepts(x) or COUNTS.accepts(x))
HUNYUAN_MOE = variant(
    HUNYUAN,
    model_type="hunyuan_v1_moe",
    class_name="HunYuanMoEV1ForCausalLM",
    keys={"num_experts": "num_experts"},
    aliases={**HUNYUAN.aliases, "num_local_experts": "num_experts", "num_experts_per_tok": "moe_topk"},
    unread=frozenset({"moe_intermediate_size", "num_shared_expert", "use_mixed_mlp_moe", "moe_layer_num_skipped"}),
    rules=(*HUNYUAN.rules, KeyRule(_experts, _experts_json, {"moe_topk": COUNT_OR_COUNTS})),
    layer_tensors={
        **EXPERT_MATRICES,
        "mlp.router": "mlp.gate.wg",
        "mlp.shared_experts.linear_fc1": gate_and_up("mlp.shared_mlp.gate_proj", "mlp.shared_mlp.up_proj"),
        "mlp.shared_experts.linear_fc2": "mlp.shared_mlp.down_proj",
    },
)
