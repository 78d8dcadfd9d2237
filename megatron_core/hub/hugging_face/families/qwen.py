"""Qwen2, Qwen2.5: Llama with biases of queries, keys and values. Qwen3: with norms instead. Qwen2-MoE and Qwen3-MoE:
with experts, the former also with a shared expert and its gate."""

from megatron_core.config import ModelConfig
from megatron_core.hub.hugging_face.architecture import register, variant
from megatron_core.hub.hugging_face.families.llama import LLAMA, QK_NORMS
from megatron_core.hub.hugging_face.rules import (
    EXPERT_MATRICES,
    ROPE,
    WINDOW_OF_ALL_LAYERS,
    WINDOWS,
    KeyRule,
    Settings,
    refuse,
    windows_where,
)
from megatron_core.hub.hugging_face.tensors import gate_and_up
from megatron_core.hub.hugging_face.text_part import register_text_part
from megatron_core.schema import COUNT, COUNT_OR_ZERO, COUNTS, SWITCH

WINDOWS_OF_LAST_LAYERS = windows_where(
    lambda keys, layer: bool(layer >= keys["max_window_layers"]), max_window_layers=COUNT_OR_ZERO
)


def _windows(hf_config: Settings) -> Settings:
    """Layers from ``max_window_layers`` on have a window if ``use_sliding_window`` is set."""
    if not hf_config.get("use_sliding_window", False):
        if "sliding_attention" in hf_config.get("layer_types", ()):
            refuse("use_sliding_window", False, "but layer_types has sliding_attention")
        return {}
    return WINDOWS_OF_LAST_LAYERS.read(hf_config)


def _windows_of_all_layers(hf_config: Settings) -> Settings:
    return WINDOW_OF_ALL_LAYERS.read(hf_config) if hf_config.get("use_sliding_window", False) else {}


def _windows_json(config: ModelConfig) -> Settings:
    return WINDOWS.write(config) | {"use_sliding_window": config.window_size is not None}


def _windows_of_qwen2_moe(hf_config: Settings) -> Settings:
    """Every second one of the first ``max_window_layers`` has a window if ``use_sliding_window`` is set."""
    if not hf_config.get("use_sliding_window", False):
        return _windows(hf_config)
    return windows_where(lambda keys, layer: layer % 2 == 0 and layer < keys["max_window_layers"]).read(hf_config)


def _expert_layers(hf_config: Settings) -> Settings:
    """Every n-th layer, ``decoder_sparse_step``, has experts, but those of ``mlp_only_layers``."""
    dense = hf_config.get("mlp_only_layers", [])
    every = hf_config.get("decoder_sparse_step", 1)
    layers = range(hf_config["num_hidden_layers"])
    return {"moe_layer_freq": tuple(int(n not in dense and (n + 1) % every == 0) for n in layers)}


def _expert_layers_json(config: ModelConfig) -> Settings:
    dense = [n for n in range(config.num_layers) if not config.has_experts(n)]
    return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


EXPERT_LAYERS = KeyRule(_expert_layers, _expert_layers_json, {"mlp_only_layers": COUNTS, "decoder_sparse_step": COUNT})
WINDOW_TYPES = {**WINDOWS_OF_LAST_LAYERS.types, "use_sliding_window": SWITCH}
QWEN_WINDOWS = KeyRule(_windows, _windows_json, WINDOW_TYPES)
QWEN_MOE_WINDOWS = KeyRule(_windows_of_all_layers, _windows_json, WINDOW_TYPES)
ROUTER_SOFTMAX = KeyRule(
    read=lambda hf_config: {"moe_router_pre_softmax": not hf_config.get("norm_topk_prob", False)},
    write=lambda config: {"norm_topk_prob": not config.moe_router_pre_softmax},
    types={"norm_topk_prob": SWITCH},
)
WINDOW_DEFAULTS = {"sliding_window": 4096, "max_window_layers": 28}

QWEN2 = variant(
    LLAMA,
    model_type="qwen2",
    class_name="Qwen2ForCausalLM",
    fixed={"add_qkv_bias": True},
    defaults=WINDOW_DEFAULTS,
    required={"hidden_act": "silu"},
    rules=(ROPE, QWEN_WINDOWS),
)
QWEN3 = variant(
    LLAMA,
    model_type="qwen3",
    class_name="Qwen3ForCausalLM",
    fixed={"qk_layernorm": True},
    defaults={**WINDOW_DEFAULTS, "head_dim": 128},
    required={"hidden_act": "silu", "attention_bias": False},
    rules=(ROPE, QWEN_WINDOWS),
    layer_tensors=QK_NORMS,
)
for _name in ("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"):
    register_text_part(
        _name, architecture="qwen2", defaults={"rope_theta": 1e6, "rms_norm_eps": 1e-5, "max_window_layers": 80}
    )
register_text_part("qwen3_vl_text", architecture="qwen3", defaults={"rope_theta": 5e5})
QWEN3_MOE = variant(
    QWEN3,
    model_type="qwen3_moe",
    class_name="Qwen3MoeForCausalLM",
    keys={
        "num_experts": "num_experts",
        "num_experts_per_tok": "moe_router_topk",
        "moe_intermediate_size": "moe_ffn_hidden_size",
        "router_aux_loss_coef": "moe_aux_loss_coeff",
    },
    aliases={"num_local_experts": "num_experts"},
    defaults=WINDOW_DEFAULTS,
    required={"hidden_act": "silu", "attention_bias": False},
    rules=(ROPE, QWEN_MOE_WINDOWS, ROUTER_SOFTMAX, EXPERT_LAYERS),
    layer_tensors=EXPERT_MATRICES,
)
QWEN2_MOE = register(
    QWEN3_MOE,
    model_type="qwen2_moe",
    class_name="Qwen2MoeForCausalLM",
    keys={
        **{key: name for key, name in QWEN3_MOE.keys.items() if key != "head_dim"},
        "shared_expert_intermediate_size": "moe_shared_expert_intermediate_size",
        "qkv_bias": "add_qkv_bias",
    },
    fixed={**LLAMA.fixed, "moe_shared_expert_gate": True},
    aliases={},
    defaults={**WINDOW_DEFAULTS, "qkv_bias": True},
    required={"hidden_act": "silu"},
    rules=(ROPE, KeyRule(_windows_of_qwen2_moe, _windows_json, WINDOW_TYPES), ROUTER_SOFTMAX, EXPERT_LAYERS),
    layer_tensors={
        **LLAMA.layer_tensors,
        **EXPERT_MATRICES,
        "mlp.shared_experts.linear_fc1": gate_and_up("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
        "mlp.shared_experts.linear_fc2": "mlp.shared_expert.down_proj",
        "mlp.shared_experts.gate_weight": "mlp.shared_expert_gate.weight",
    },
)
