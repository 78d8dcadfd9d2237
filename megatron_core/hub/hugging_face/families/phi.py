"""Phi-1, Phi-1.5 and Phi-2: attention and MLP in parallel with one norm, biases everywhere, rotary positions in a part
of each head's channels. Phi-3: Llama with fused matrices, also with LongRoPE. Phi-3.5-MoE: Mixtral with LayerNorm,
optional biases, and experts that are chosen one after the other (sparsemixer)."""

from dataclasses import replace

from megatron_core.config import ModelConfig
from megatron_core.hub.hugging_face.architecture import Architecture, register, variant
from megatron_core.hub.hugging_face.families.llama import LLAMA
from megatron_core.hub.hugging_face.families.mistral import MIXTRAL
from megatron_core.hub.hugging_face.rules import (
    ATTENTION_BIASES,
    LONGROPE_MSCALES,
    PARTIAL_ROPE,
    ROPE,
    WINDOW_OF_ALL_LAYERS,
    KeyRule,
    Settings,
    gelu,
    refuse,
    rope_parameters,
    rope_type,
)
from megatron_core.hub.hugging_face.tensors import separate_qkv, stacked_qkv
from megatron_core.schema import NUMBER

PHI = register(
    Architecture(
        model_type="phi",
        class_name="PhiForCausalLM",
        keys={
            "num_hidden_layers": "num_layers",
            "hidden_size": "hidden_size",
            "num_attention_heads": "num_attention_heads",
            "num_key_value_heads": "num_query_groups",
            "intermediate_size": "ffn_hidden_size",
            "layer_norm_eps": "norm_epsilon",
            "max_position_embeddings": "max_position_embeddings",
            "initializer_range": "init_method_std",
            "qk_layernorm": "qk_layernorm",
            "embd_pdrop": "hidden_dropout",
            "resid_pdrop": "hidden_dropout",  # takes precedence
            "attention_dropout": "attention_dropout",
        },
        fixed={
            "position_embedding_type": "rope",
            "parallel_residual": True,
            "parallel_residual_shared_norm": True,
            "add_output_layer_bias": True,
        },
        defaults={"layer_norm_eps": 1e-5, "qk_layernorm": False, "partial_rotary_factor": 0.5},
        rules=(PARTIAL_ROPE, gelu("hidden_act", "gelu_new")),
        tensors={**LLAMA.tensors, "decoder.final_layernorm": "model.final_layernorm"},
        layer_prefix=LLAMA.layer_prefix,
        layer_tensors={
            "input_layernorm": "input_layernorm",
            "self_attention.linear_qkv": separate_qkv("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "self_attention.linear_proj": "self_attn.dense",
            "self_attention.q_layernorm": "self_attn.q_layernorm",
            "self_attention.k_layernorm": "self_attn.k_layernorm",
            "mlp.linear_fc1": "mlp.fc1",
            "mlp.linear_fc2": "mlp.fc2",
        },
    )
)


def _phi3_positions(hf_config: Settings) -> Settings:
    """Early files say su or yarn, which mean longrope."""
    rope = rope_parameters(hf_config)
    scaling = rope_type(rope)
    if scaling not in ("default", "longrope", "su", "yarn"):
        refuse("rope_type", scaling, "for phi3 supported are default and longrope")
    return PARTIAL_ROPE.read(hf_config if scaling == "default" else {**hf_config, "rope_scaling": rope | LONGROPE})


LONGROPE = {"rope_type": "longrope"}
PHI3 = variant(
    LLAMA,
    model_type="phi3",
    class_name="Phi3ForCausalLM",
    keys={"head_dim": None, "resid_pdrop": "hidden_dropout"},
    defaults={"max_position_embeddings": 4096, "original_max_position_embeddings": 4096},
    required={"hidden_act": "silu"},
    rules=(replace(PARTIAL_ROPE, read=_phi3_positions), WINDOW_OF_ALL_LAYERS),
    layer_tensors={
        "self_attention.linear_qkv": stacked_qkv("self_attn.qkv_proj"),
        "mlp.linear_fc1": "mlp.gate_up_proj",
    },
)


def _phimoe_positions(hf_config: Settings) -> Settings:
    """LongRoPE has a magnitude for short and one for long texts."""
    rope = rope_parameters(hf_config)
    scaling = rope_type(rope)
    if scaling == "default":
        return ROPE.read(hf_config)
    if scaling != "longrope" or any(rope.get(key) is None for key in LONGROPE_MSCALES):
        refuse("rope_type", scaling, "for phimoe supported are default, and longrope with short_mscale and long_mscale")
    parameters = {key: value for key, value in rope.items() if key not in (*LONGROPE_MSCALES, "attention_factor")}
    scales = {setting: float(rope[key]) for key, setting in LONGROPE_MSCALES.items()}
    return ROPE.read({**hf_config, "rope_scaling": parameters}) | scales


def _phimoe_positions_json(config: ModelConfig) -> Settings:
    keys = ROPE.write(config)
    if config.has_longrope:
        key = "original_max_position_embeddings"
        scaling = {name: value for name, value in keys["rope_scaling"].items() if name != "attention_factor"}
        scales = {name: getattr(config, setting) for name, setting in LONGROPE_MSCALES.items()}
        keys["rope_scaling"] = {**scaling, **scales, key: keys[key]}
    return keys


def _routing(hf_config: Settings) -> Settings:
    if hf_config["num_experts_per_tok"] != 2:
        refuse("num_experts_per_tok", hf_config["num_experts_per_tok"], "transformers chooses 2 in any case")
    return {
        "moe_sparsemixer_threshold": float(hf_config["router_jitter_noise"]),
        "moe_input_jitter_eps": float(hf_config["input_jitter_noise"]) or None,
    }


def _routing_json(config: ModelConfig) -> Settings:
    return {
        "router_jitter_noise": config.moe_sparsemixer_threshold,
        "input_jitter_noise": config.moe_input_jitter_eps or 0.0,
    }


PHIMOE = variant(
    MIXTRAL,
    model_type="phimoe",
    class_name="PhimoeForCausalLM",
    keys={"lm_head_bias": "add_output_layer_bias"},
    fixed={"normalization": "LayerNorm", "moe_router_score_function": "sparsemixer"},
    defaults={
        "max_position_embeddings": 4096 * 32,
        "num_key_value_heads": 8,
        "rope_theta": 1e6,
        "num_experts_per_tok": 2,
        "router_jitter_noise": 0.01,
        "input_jitter_noise": 0.0,
        "lm_head_bias": False,
    },
    required={"hidden_act": "silu", "hidden_dropout": 0.0},
    rules=(
        KeyRule(_phimoe_positions, _phimoe_positions_json, ROPE.types),
        WINDOW_OF_ALL_LAYERS,
        ATTENTION_BIASES,
        KeyRule(_routing, _routing_json, {"router_jitter_noise": NUMBER, "input_jitter_noise": NUMBER}),
    ),
)
