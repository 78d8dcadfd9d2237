"""DeepSeek-V3: latent attention, and experts that are chosen in groups with a bias."""

from megatron_core.config import ModelConfig
from megatron_core.config.presets import DEEPSEEK_V3_LAYERS
from megatron_core.errors import CheckpointError
from megatron_core.models.hf.architecture import Architecture, Settings, fault, rope_json, rope_of, rope_settings
from megatron_core.models.hf.llama import LAYER, LLAMA_TENSORS, THEIRS, with_experts
from megatron_core.models.hf.tensors import TensorSource, shared_gate_and_value


def _deepseek_settings(theirs: Settings) -> Settings:
    """The first layers have no experts; the shared ones are so many times as wide as a routed one."""
    if not isinstance(shared := theirs.get("n_shared_experts"), int) or shared < 1:
        fault("n_shared_experts", shared, "deepseek_v3 models need 1 or more")
    if theirs.get("head_dim", theirs["qk_rope_head_dim"]) != theirs["qk_rope_head_dim"]:
        fault("head_dim", theirs["head_dim"], f"supported is qk_rope_head_dim={theirs['qk_rope_head_dim']}")
    rope = rope_of(theirs)
    if rope.get("mscale_all_dim") and not (rope.get("rope_type", rope.get("type")) == "yarn" and rope.get("mscale")):
        fault("mscale_all_dim", rope["mscale_all_dim"], "supported is rope_type=yarn with mscale beside it")
    layers = theirs["num_hidden_layers"]
    dense = min(theirs.get("first_k_dense_replace", 3), layers)
    limits, k = theirs["topk_group"] < theirs["n_group"], theirs["num_experts_per_tok"]
    if limits and k != 2 * theirs["topk_group"]:
        raise CheckpointError(
            f"config.json says num_experts_per_tok={k} and topk_group={theirs['topk_group']}; groups are chosen by "
            "their two best experts, which is supported for two experts from each group"
        )
    return rope_settings(theirs) | {
        "moe_layer_freq": (0,) * dense + (1,) * (layers - dense),
        "moe_shared_expert_intermediate_size": shared * theirs["moe_intermediate_size"],
    }


def _deepseek_json(config: ModelConfig) -> Settings:
    sparse, width = config.expert_layers, config.expert_ffn_size
    return rope_json(config) | {
        "first_k_dense_replace": sparse[0] if sparse else config.num_layers,
        "n_shared_experts": (config.moe_shared_expert_intermediate_size or 0) // width,
        "num_key_value_heads": config.num_attention_heads,
        "head_dim": config.qk_pos_emb_head_dim,
    }


LATENT_TENSORS = {
    f"{LAYER}self_attention.{ours}.weight": TensorSource((f"{THEIRS}self_attn.{theirs}.weight",))
    for ours, theirs in {
        "linear_q_proj": "q_proj",
        "linear_q_down_proj": "q_a_proj",
        "q_layernorm": "q_a_layernorm",
        "linear_q_up_proj": "q_b_proj",
        "linear_kv_down_proj": "kv_a_proj_with_mqa",
        "kv_layernorm": "kv_a_layernorm",
        "linear_kv_up_proj": "kv_b_proj",
    }.items()
}
DEEPSEEK_V3 = Architecture.of(
    "deepseek_v3",
    with_experts("mlp.", ("gate_proj", "up_proj", "down_proj"))
    | {name: source for name, source in LLAMA_TENSORS.items() if ".mlp." in name}
    | LATENT_TENSORS
    | {
        LAYER + "mlp.router.expert_bias": TensorSource((THEIRS + "mlp.gate.e_score_correction_bias",)),
        LAYER + "mlp.shared_experts.linear_fc1.weight": TensorSource(
            (THEIRS + "mlp.shared_experts.gate_proj.weight", THEIRS + "mlp.shared_experts.up_proj.weight"),
            shared_gate_and_value,
        ),
        LAYER + "mlp.shared_experts.linear_fc2.weight": TensorSource((THEIRS + "mlp.shared_experts.down_proj.weight",)),
    },
    read=_deepseek_settings,
    write=_deepseek_json,
    layers=DEEPSEEK_V3_LAYERS,
)
