"""gpt-oss: attention sinks, windows in every second layer, experts with biases and bounded activations, YaRN."""

from dataclasses import replace

from megatron_core.config import ModelConfig
from megatron_core.hub.hugging_face.architecture import variant
from megatron_core.hub.hugging_face.families.llama import LLAMA
from megatron_core.hub.hugging_face.rules import ROPE, Settings, windows_where
from megatron_core.hub.hugging_face.tensors import TensorSource, alternating_gate_and_up

YARN = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""``rope_parameters`` of transformers if config.json has none."""


def _rope(hf_config: Settings) -> Settings:
    has_rope = "rope_scaling" in hf_config or "rope_parameters" in hf_config
    return ROPE.read(hf_config if has_rope else {**hf_config, "rope_parameters": YARN})


def _rope_json(config: ModelConfig) -> Settings:
    keys = ROPE.write(config)
    if keys["rope_scaling"] is None:  # which would mean YaRN
        keys["rope_parameters"] = {"rope_type": "default", "rope_theta": config.rotary_base}
    return keys


GPT_OSS = variant(
    LLAMA,
    model_type="gpt_oss",
    class_name="GptOssForCausalLM",
    unread=frozenset({"experts_per_token"}),
    keys={
        "num_local_experts": "num_experts",
        "num_experts_per_tok": "moe_router_topk",
        "router_aux_loss_coef": "moe_aux_loss_coeff",
        "swiglu_limit": "activation_func_clamp_value",
    },
    fixed={
        "swiglu": False,
        "quick_geglu": True,
        "glu_linear_offset": 1.0,
        "disable_bias_linear": False,
        "softmax_type": "learnable",
    },
    defaults={"head_dim": 64, "sliding_window": 128, "swiglu_limit": 7.0, "rope_theta": 150000.0},
    required={"hidden_act": "silu", "attention_bias": True, "swiglu_alpha": 1.702},
    rules=(replace(ROPE, read=_rope, write=_rope_json), windows_where(lambda _, layer: layer % 2 == 0)),
    layer_tensors={
        "self_attention.softmax_offset": "self_attn.sinks",
        "mlp.router": "mlp.router",
        "mlp.experts.linear_fc1.weight": alternating_gate_and_up("mlp.experts.gate_up_proj"),
        "mlp.experts.linear_fc1.bias": alternating_gate_and_up("mlp.experts.gate_up_proj_bias"),
        "mlp.experts.linear_fc2.weight": TensorSource(("mlp.experts.down_proj",), transposed=True, stacked=True),
        "mlp.experts.linear_fc2.bias": "mlp.experts.down_proj_bias",
    },
    quantized=("mxfp4",),
)
