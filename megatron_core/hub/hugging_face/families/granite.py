"""Granite: Llama with factors on embeddings, scores, logits and the outputs of layers; with experts, and with shared
experts. HyperCLOVA X: with norms behind attention and MLP, too."""

from megatron_core.config import ModelConfig
from megatron_core.hub.hugging_face.architecture import variant
from megatron_core.hub.hugging_face.families.llama import LLAMA
from megatron_core.hub.hugging_face.rules import ATTENTION_BIASES, ROPE, KeyRule, Settings
from megatron_core.hub.hugging_face.tensors import TensorSource
from megatron_core.schema import LENGTH_OR_ZERO, POSITIVE, SWITCH


def _factors(hf_config: Settings) -> Settings:
    scale = float(hf_config["attention_multiplier"])
    divisor = float(hf_config["logits_scaling"])
    return {"softmax_scale": scale, "logit_multiplier": 1.0 / divisor}


def _factors_json(config: ModelConfig) -> Settings:
    divisor = 1.0 / config.logit_multiplier
    rounded = float(f"{divisor:.12g}")  # 49.0 instead of 48.99999999999999
    return {
        "attention_multiplier": config.softmax_scale or config.head_size**-0.5,
        "logits_scaling": rounded if 1.0 / rounded == config.logit_multiplier else divisor,
    }


FACTORS = KeyRule(_factors, _factors_json, dict.fromkeys(("attention_multiplier", "logits_scaling"), POSITIVE))
GRANITE = variant(
    LLAMA,
    model_type="granite",
    class_name="GraniteForCausalLM",
    keys={
        "head_dim": None,
        "embedding_multiplier": "embedding_multiplier",
        "residual_multiplier": "residual_multiplier",
    },
    defaults=dict.fromkeys(
        ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"), 1.0
    ),
    rules=(ROPE, ATTENTION_BIASES, FACTORS),
)
GRANITE_MOE = variant(
    GRANITE,
    model_type="granitemoe",
    class_name="GraniteMoeForCausalLM",
    keys={
        "num_local_experts": "num_experts",
        "num_experts_per_tok": "moe_router_topk",
        "router_aux_loss_coef": "moe_aux_loss_coeff",
    },
    aliases={"num_experts": "num_local_experts"},
    required={"hidden_act": "silu", "attention_bias": False},
    layer_tensors={
        "mlp.router": "block_sparse_moe.router.layer",
        "mlp.experts.linear_fc1": TensorSource(("block_sparse_moe.input_linear",), stacked=True),
        "mlp.experts.linear_fc2": TensorSource(("block_sparse_moe.output_linear",), stacked=True),
    },
)


def _shared(hf_config: Settings) -> Settings:
    return {"moe_shared_expert_intermediate_size": hf_config.get("shared_intermediate_size") or None}


def _shared_json(config: ModelConfig) -> Settings:
    return {"shared_intermediate_size": config.moe_shared_expert_intermediate_size or 0}


GRANITE_MOE_SHARED = variant(
    GRANITE_MOE,
    model_type="granitemoeshared",
    class_name="GraniteMoeSharedForCausalLM",
    rules=(ROPE, FACTORS, KeyRule(_shared, _shared_json, {"shared_intermediate_size": LENGTH_OR_ZERO})),
    layer_tensors={
        "mlp.shared_experts.linear_fc1": "shared_mlp.input_linear",
        "mlp.shared_experts.linear_fc2": "shared_mlp.output_linear",
    },
)


def _peri_norms(hf_config: Settings) -> Settings:
    """``use_post_norm``: norms before and behind attention and MLP."""
    channels = hf_config.get("head_dim", hf_config["hidden_size"] // hf_config["num_attention_heads"])
    return {
        "norm_placement": "sandwich" if hf_config.get("use_post_norm", True) else "pre",
        "softmax_scale": float(hf_config.get("attention_multiplier", channels**-0.5)),
    }


def _peri_norms_json(config: ModelConfig) -> Settings:
    return {
        "use_post_norm": config.norm_placement == "sandwich",
        "attention_multiplier": config.softmax_scale or config.head_size**-0.5,
    }


HYPERCLOVAX = variant(
    GRANITE,
    model_type="hyperclovax",
    class_name="HyperCLOVAXForCausalLM",
    keys={"head_dim": "kv_channels", "logits_scaling": "logit_multiplier"},
    defaults=dict.fromkeys(("embedding_multiplier", "residual_multiplier", "logits_scaling"), 1.0),
    rules=(
        ROPE,
        ATTENTION_BIASES,
        KeyRule(_peri_norms, _peri_norms_json, {"attention_multiplier": POSITIVE, "use_post_norm": SWITCH}),
    ),
    layer_tensors={"post_self_attn_layernorm": "post_norm1", "post_mlp_layernorm": "post_norm2"},
)
