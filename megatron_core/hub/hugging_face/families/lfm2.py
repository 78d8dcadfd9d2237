"""LFM2: layers of a gated short convolution or attention, and an MLP or experts, which are two layers each here."""

from megatron_core.config import ModelConfig
from megatron_core.features.recurrent.settings import CONVOLUTION, RecurrentConfig
from megatron_core.hub.hugging_face.architecture import register, variant
from megatron_core.hub.hugging_face.families.llama import LLAMA
from megatron_core.hub.hugging_face.rules import ROPE, KeyRule, Settings, refuse
from megatron_core.hub.hugging_face.tensors import gate_and_up, separate_qkv
from megatron_core.schema import COUNT, COUNT_OR_ZERO, COUNTS, POSITIVE, STRINGS, SWITCH, WIDTH

KINDS = {"conv": CONVOLUTION, "full_attention": "*"}
"""Values of ``layer_types`` -> letters of the pattern."""


def _layers(hf_config: Settings) -> Settings:
    count: int = hf_config["num_hidden_layers"]
    kinds = hf_config.get("layer_types")
    if kinds is None:
        attention = hf_config.get("full_attn_idxs", list(range(count)))
        kinds = ["full_attention" if n in attention else "conv" for n in range(count)]
    if len(kinds) != count or set(kinds) - set(KINDS):
        refuse("layer_types", kinds, f"it must have one of {', '.join(KINDS)} for each of {count} layers")
    dense = hf_config.get("num_dense_layers", count)
    pattern = "".join(KINDS[layer_type] + ("-" if n < dense else "E") for n, layer_type in enumerate(kinds))
    settings = {"num_layers": len(pattern), "hybrid_layer_pattern": pattern}
    return settings | ({"linear_conv_kernel_dim": hf_config["conv_L_cache"]} if CONVOLUTION in pattern else {})


def _layers_json(config: ModelConfig) -> Settings:
    config = config.section(RecurrentConfig)
    mixers = (config.hybrid_layer_pattern or "")[::2]
    return {
        "num_hidden_layers": config.num_layers // 2,
        "layer_types": ["full_attention" if letter == "*" else "conv" for letter in mixers],
        "conv_L_cache": config.linear_conv_kernel_dim,
        "tie_embedding": config.share_embeddings_and_output_weights,  # of earlier releases
    }


LAYERS = KeyRule(
    _layers,
    _layers_json,
    {
        **dict.fromkeys(("num_hidden_layers", "conv_L_cache"), COUNT),
        "layer_types": STRINGS,
        "full_attn_idxs": COUNTS,
    },
)


def _widths(hf_config: Settings) -> Settings:
    """``block_auto_adjust_ff_dim``: two thirds of the width times a factor, rounded up to a multiple."""
    width = hf_config.get("block_ff_dim") or hf_config["intermediate_size"]
    factor = hf_config.get("block_ffn_dim_multiplier")
    unit = hf_config["block_multiple_of"]
    if hf_config["block_auto_adjust_ff_dim"]:
        width = int(2 * width / 3)
        if factor is not None:
            width = -(-int(factor * width) // unit) * unit
    return {"ffn_hidden_size": width}


def _widths_json(config: ModelConfig) -> Settings:
    sizes = dict.fromkeys(("intermediate_size", "block_ff_dim"), config.ffn_size)
    return {**sizes, "block_auto_adjust_ff_dim": False}


LFM2 = register(
    LLAMA,
    model_type="lfm2",
    class_name="Lfm2ForCausalLM",
    keys={
        "hidden_size": "hidden_size",
        "num_attention_heads": "num_attention_heads",
        "num_key_value_heads": "num_query_groups",
        "head_dim": "kv_channels",
        "norm_eps": "norm_epsilon",
        "max_position_embeddings": "max_position_embeddings",
        "initializer_range": "init_method_std",
    },
    fixed={**LLAMA.fixed, "qk_layernorm": True},
    aliases={"tie_embedding": "tie_word_embeddings"},
    defaults={
        **{"num_key_value_heads": 8, "norm_eps": 1e-5, "rope_theta": 1e6, "tie_word_embeddings": True},
        **{"conv_L_cache": 3, "intermediate_size": 12288},
        **{"block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": True},
    },
    required={"conv_bias": False, "block_use_swiglu": True, "use_pos_enc": True},
    rules=(
        ROPE,
        LAYERS,
        KeyRule(
            _widths,
            _widths_json,
            {
                **dict.fromkeys(("intermediate_size", "block_ff_dim", "block_multiple_of"), WIDTH),
                **{"block_ffn_dim_multiplier": POSITIVE, "block_auto_adjust_ff_dim": SWITCH},
            },
        ),
    ),
    tensors={**LLAMA.tensors, "decoder.final_layernorm": "model.embedding_norm"},
    parts_of_layer=2,
    layer_tensors={
        "input_layernorm": "operator_norm",
        "pre_mlp_layernorm": "ffn_norm",
        "self_attention.in_proj": "conv.in_proj",
        "self_attention.conv1d": "conv.conv",
        "self_attention.out_proj": "conv.out_proj",
        "self_attention.linear_qkv": separate_qkv("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "self_attention.q_layernorm": "self_attn.q_layernorm",
        "self_attention.k_layernorm": "self_attn.k_layernorm",
        "self_attention.linear_proj": "self_attn.out_proj",
        "mlp.linear_fc1": gate_and_up("feed_forward.w1", "feed_forward.w3"),
        "mlp.linear_fc2": "feed_forward.w2",
    },
)


def _experts_json(config: ModelConfig) -> Settings:
    mlps = (config.section(RecurrentConfig).hybrid_layer_pattern or "")[1::2]
    return {"num_dense_layers": mlps.index("E") if "E" in mlps else len(mlps)}


LFM2_MOE = variant(
    LFM2,
    model_type="lfm2_moe",
    class_name="Lfm2MoeForCausalLM",
    keys={
        "intermediate_size": "ffn_hidden_size",
        "num_experts": "num_experts",
        "num_experts_per_tok": "moe_router_topk",
        "moe_intermediate_size": "moe_ffn_hidden_size",
        "use_expert_bias": "moe_router_enable_expert_bias",
        "routed_scaling_factor": "moe_router_topk_scaling_factor",
    },
    fixed={"moe_router_score_function": "sigmoid", "moe_router_sum_epsilon": 1e-6, "moe_aux_loss_coeff": 0.0},
    defaults={
        **{"num_key_value_heads": 8, "norm_eps": 1e-5, "rope_theta": 1e6, "tie_word_embeddings": True},
        **{"conv_L_cache": 3, "intermediate_size": 7168, "moe_intermediate_size": 1792, "num_dense_layers": 2},
        **{"num_experts": 32, "num_experts_per_tok": 4, "use_expert_bias": True, "routed_scaling_factor": 1.0},
    },
    required={"conv_bias": False, "norm_topk_prob": True},
    rules=(ROPE, LAYERS, KeyRule(lambda _: {}, _experts_json, {"num_dense_layers": COUNT_OR_ZERO})),
    layer_tensors={
        "mlp.router": "feed_forward.gate",
        "mlp.router.expert_bias": "feed_forward.expert_bias",
        "mlp.experts.linear_fc1": gate_and_up("feed_forward.experts.{e}.w1", "feed_forward.experts.{e}.w3"),
        "mlp.experts.linear_fc2": "feed_forward.experts.{e}.w2",
    },
)
