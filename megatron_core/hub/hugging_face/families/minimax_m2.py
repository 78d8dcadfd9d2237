"""MiniMax-M2: norms of queries and keys over all heads, and experts that are chosen by a sigmoid and a bias."""

from megatron_core.config import ModelConfig
from megatron_core.hub.hugging_face.architecture import variant
from megatron_core.hub.hugging_face.families.glm import SIGMOID_ROUTING
from megatron_core.hub.hugging_face.families.llama import QK_NORMS
from megatron_core.hub.hugging_face.families.mistral import MIXTRAL
from megatron_core.hub.hugging_face.rules import PARTIAL_ROPE, KeyRule, Settings
from megatron_core.schema import WIDTH


def _positions(hf_config: Settings) -> Settings:
    """``rotary_dim``, the number of rotating channels of a head, is that of published files."""
    channels = hf_config.get("rotary_dim")
    rotated = {} if channels is None else {"partial_rotary_factor": channels / hf_config["head_dim"]}
    return PARTIAL_ROPE.read({**rotated, **hf_config})


def _positions_json(config: ModelConfig) -> Settings:
    return PARTIAL_ROPE.write(config) | {"rotary_dim": round(config.head_size * config.rotary_percent)}


MINIMAX_M2 = variant(
    MIXTRAL,
    model_type="minimax_m2",
    class_name="MiniMaxM2ForCausalLM",
    unread=frozenset(
        {"attn_type_list", "mtp_transformer_layers", "num_mtp_modules", "qk_norm_type", "shared_moe_mode"}
        | {"use_qk_norm", "use_routing_bias"}
    ),
    fixed={**SIGMOID_ROUTING, "qk_layernorm": True, "qk_layernorm_over_heads": True},
    defaults={"num_key_value_heads": 8, "head_dim": 128, "rope_theta": 5e6},
    required={"hidden_act": "silu", "router_jitter_noise": 0.0, "scoring_func": "sigmoid"},
    rules=(KeyRule(_positions, _positions_json, {**PARTIAL_ROPE.types, "rotary_dim": WIDTH}),),
    layer_tensors={**QK_NORMS, "mlp.router.expert_bias": "block_sparse_moe.e_score_correction_bias"},
)
