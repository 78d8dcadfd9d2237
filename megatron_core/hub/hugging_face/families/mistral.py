"""Mistral: Llama with a sliding window; Mixtral: Mistral with experts. Ministral: windows in some layers. Ministral 3:
queries with a temperature. Code World Model: Llama with windows."""

from dataclasses import replace

from megatron_core.config import ModelConfig
from megatron_core.hub.hugging_face.architecture import register, variant
from megatron_core.hub.hugging_face.families.llama import LLAMA
from megatron_core.hub.hugging_face.rules import (
    LLAMA3,
    LLAMA3_CONTEXT,
    ROPE,
    ROPE_PARAMETERS,
    WINDOW_OF_ALL_LAYERS,
    WINDOWS,
    KeyRule,
    Settings,
    refuse,
    rope_parameters,
    windows_where,
)
from megatron_core.hub.hugging_face.tensors import gate_and_up
from megatron_core.schema import NUMBER

MISTRAL = register(
    LLAMA,
    model_type="mistral",
    class_name="MistralForCausalLM",
    defaults={"sliding_window": 4096},
    required={"hidden_act": "silu", "attention_bias": False},
    rules=(ROPE, WINDOWS),
)


def _windows_json(config: ModelConfig) -> Settings:
    """Always a size of windows, which transformers needs, even if no layer has a window."""
    kinds = {
        "sliding_window": config.max_position_embeddings or 4096,
        "layer_types": ["full_attention"] * config.num_layers,
    }
    return kinds if config.window_size is None else WINDOWS.write(config)


MINISTRAL = register(
    MISTRAL,
    model_type="ministral",
    class_name="MinistralForCausalLM",
    rules=(ROPE, KeyRule(WINDOWS.read, _windows_json, WINDOWS.types)),
)
MIXTRAL = variant(
    LLAMA,
    model_type="mixtral",
    class_name="MixtralForCausalLM",
    keys={
        "num_local_experts": "num_experts",
        "num_experts_per_tok": "moe_router_topk",
        "router_aux_loss_coef": "moe_aux_loss_coeff",
    },
    defaults={"rope_theta": 1e6},
    required={"hidden_act": "silu", "router_jitter_noise": 0.0},
    rules=(ROPE, WINDOW_OF_ALL_LAYERS),
    layer_tensors={
        "mlp.router": "block_sparse_moe.gate",
        "mlp.experts.linear_fc1": gate_and_up("block_sparse_moe.experts.{e}.w1", "block_sparse_moe.experts.{e}.w3"),
        "mlp.experts.linear_fc2": "block_sparse_moe.experts.{e}.w2",
    },
)


BETA = "llama_4_scaling_beta"
ORIGINAL = "original_max_position_embeddings"
MINISTRAL3_POSITIONS = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    ORIGINAL: 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    BETA: 0.1,
}


def _temperature(hf_config: Settings) -> Settings:
    """Positions, and the temperature of queries, which counts in steps of the original positions."""
    rope = rope_parameters(hf_config)
    settings = ROPE.read(hf_config)
    beta = rope.get(BETA)
    if not beta:
        return settings
    floor = rope.get(ORIGINAL) or refuse(BETA, beta, f"it needs {ORIGINAL} in the same object")
    return {
        **settings,
        "query_temperature_scale": float(beta),
        "query_temperature_floor": floor,
        "query_temperature_of_rotary": True,
    }


def _temperature_json(config: ModelConfig) -> Settings:
    keys = ROPE_PARAMETERS.write(config)
    original = {ORIGINAL: config.query_temperature_floor} if config.query_temperature_scale else {}
    parameters = {key: value for key, value in keys["rope_parameters"].items() if value is not None}
    return {**keys, "rope_parameters": original | parameters | {BETA: config.query_temperature_scale}}


MINISTRAL3 = register(
    MISTRAL,
    model_type="ministral3",
    class_name="Ministral3ForCausalLM",
    defaults={"num_key_value_heads": 8, "head_dim": 128, "rope_parameters": MINISTRAL3_POSITIONS},
    rules=(KeyRule(_temperature, _temperature_json, {**ROPE.types, BETA: NUMBER}), WINDOW_OF_ALL_LAYERS),
)


WINDOWS_OF_THREE_IN_FOUR = replace(windows_where(lambda _, layer: layer % 4 != 0), write=_windows_json)
"""Every fourth layer, from the first on, has no window."""
CWM = register(
    LLAMA,
    model_type="cwm",
    class_name="CwmForCausalLM",
    not_null=("bos_token_id",),
    defaults={
        **{"num_key_value_heads": 8, "head_dim": 128, "sliding_window": 8192},
        "rope_parameters": {"rope_type": "llama3", "rope_theta": 1e6, "factor": 16.0, **LLAMA3}
        | {"original_max_position_embeddings": LLAMA3_CONTEXT},
    },
    required={"hidden_act": "silu", "mlp_bias": False, "attention_bias": False},
    rules=(ROPE_PARAMETERS, WINDOWS_OF_THREE_IN_FOUR),
)
