"""Hunyuan (dense): Llama with norms of queries and keys after their rotation."""

from megatron_core.models.hf.architecture import register
from megatron_core.models.hf.families.llama import LLAMA
from megatron_core.models.hf.rules import ATTENTION_BIASES, POSITIVE, ROPE, Rule, Settings, rope_parameters, rope_type


def _positions(hf_config: Settings) -> Settings:
    """With ``alpha``, the positions called dynamic have the base rope_theta * alpha^(d / (d - 2)) at every length."""
    rope = rope_parameters(hf_config)
    if rope_type(rope) != "dynamic" or not rope.get("alpha"):
        return ROPE.read(hf_config)
    channels = hf_config.get("head_dim") or hf_config["hidden_size"] // hf_config["num_attention_heads"]
    plain = ROPE.read({**hf_config, "rope_scaling": None, "rope_parameters": {**rope, "rope_type": "default"}})
    return {**plain, "rotary_base": plain["rotary_base"] * rope["alpha"] ** (channels / (channels - 2))}


HUNYUAN = register(
    LLAMA,
    model_type="hunyuan_v1_dense",
    class_name="HunYuanDenseV1ForCausalLM",
    fixed={**LLAMA.fixed, "qk_layernorm": True, "qk_layernorm_after_rotary": True},
    aliases={"attention_head_dim": "head_dim"},
    # Keys of published files that transformers does not read.
    required={"hidden_act": "silu", "mlp_bias": False, "use_qk_norm": True, "use_cla": False, "norm_type": "rms"},
    rules=(Rule(_positions, ROPE.write, {**ROPE.types, "alpha": POSITIVE}), ATTENTION_BIASES),
    layer_tensors={
        **LLAMA.layer_tensors,
        "self_attention.q_layernorm": "self_attn.query_layernorm",
        "self_attention.k_layernorm": "self_attn.key_layernorm",
    },
)
