"""Granite: Llama with factors on embeddings, scores, logits and the outputs of layers; with experts, and with shared
experts. HyperCLOVA X: with norms behind attention and MLP, too."""

from megatron_core.config import ModelConfig
from megatron_core.hub.hugging_face.rules import KeyRule, Settings
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


SHARED_EXPERTS = KeyRule(
    read=lambda hf_config: {
        "moe_shared_expert_intermediate_size": hf_config.get("shared_intermediate_size") or None,
    },
    write=lambda config: {"shared_intermediate_size": config.moe_shared_expert_intermediate_size or 0},
    types={"shared_intermediate_size": LENGTH_OR_ZERO},
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


PERI_NORMS = KeyRule(_peri_norms, _peri_norms_json, {"attention_multiplier": POSITIVE, "use_post_norm": SWITCH})
