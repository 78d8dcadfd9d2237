"""Falcon-H1: layers of parallel attention and Mamba-2 mixer, and an MLP, with factors on many of their parts."""

import math

from megatron_core.config import ModelConfig
from megatron_core.features.recurrent.kinds import Mamba2
from megatron_core.features.recurrent.settings import RecurrentConfig
from megatron_core.foreign_json import COUNT, FACTORS, POSITIVE, SWITCH, KeyType
from megatron_core.hub.hugging_face.families.bamba import HEAD_SIZE
from megatron_core.hub.hugging_face.rules import KeyRule, Settings, refuse

ORDER = (1, 2, 3, 0, 4)
"""Places in ``ssm_multipliers``, those of gates, inputs, B, C and steps, of the factors in ``mamba_multipliers``."""
SINGLE = (
    *("key_multiplier", "attention_in_multiplier", "attention_out_multiplier"),
    *("ssm_in_multiplier", "ssm_out_multiplier"),
)
NORMS = {(False, True): "none", (False, False): "none", (True, False): "after_gate", (True, True): "before_gate"}
"""Values of ``mamba_rms_norm`` and ``mamba_norm_before_gate`` -> ``mamba_output_norm``; export writes the last."""


def _factors_of(count: int) -> KeyType:
    return KeyType(
        f"a list of {count} finite numbers above 0", lambda value: FACTORS.accepts(value) and len(value) == count
    )


def _layers(hf_config: Settings) -> Settings:
    inner = hf_config.get("mamba_d_ssm") or hf_config["mamba_expand"] * hf_config["hidden_size"]
    heads = hf_config["mamba_n_heads"]
    size = hf_config["mamba_d_head"]
    size = inner // heads if size == "auto" else size
    if size * heads != inner:
        refuse("mamba_d_head", size, f"mamba_n_heads={heads} x mamba_d_head must be mamba_d_ssm={inner}")
    pattern = "H-" * hf_config["num_hidden_layers"]
    norm = NORMS[hf_config["mamba_rms_norm"], hf_config["mamba_norm_before_gate"]]
    return {
        **{"num_layers": len(pattern), "hybrid_layer_pattern": pattern},
        **{"mamba_num_heads": heads, "mamba_head_dim": size, "mamba_output_norm": norm},
    }


def _layers_json(config: ModelConfig) -> Settings:
    config = config.section(RecurrentConfig)
    sizes = Mamba2(config)
    normed, first = next(keys for keys, norm in reversed(NORMS.items()) if norm == config.mamba_output_norm)
    return {
        "num_hidden_layers": config.num_layers // 2,
        **{"mamba_d_ssm": sizes.heads * sizes.value_head_size, "mamba_n_heads": sizes.heads},
        **{
            "mamba_d_head": config.mamba_head_dim,
            "mamba_rms_norm": normed,
            "mamba_norm_before_gate": first,
        },
    }


def _multipliers(hf_config: Settings) -> Settings:
    """Factors on an input become those on the outputs of its projections."""
    key, attention_in, attention_out, ssm_in, ssm_out = (float(hf_config[name]) for name in SINGLE)
    scores = key * attention_in * attention_in
    ssm = hf_config["ssm_multipliers"]
    head = hf_config.get("head_dim") or hf_config["hidden_size"] // hf_config["num_attention_heads"]
    return {
        "softmax_scale": None if scores == 1.0 else scores / math.sqrt(head),
        "parallel_mixer_multipliers": (attention_in * attention_out, ssm_out),
        "mamba_multipliers": tuple(ssm_in * float(ssm[index]) for index in ORDER),
        "mlp_multipliers": tuple(map(float, hf_config["mlp_multipliers"])),
    }


def _multipliers_json(config: ModelConfig) -> Settings:
    config = config.section(RecurrentConfig)
    key = 1.0
    if (scale := config.softmax_scale) is not None:
        root = math.sqrt(config.head_size)
        nearest = scale * root
        nearby = (nearest, math.nextafter(nearest, 0.0), math.nextafter(nearest, math.inf))
        key = next((candidate for candidate in nearby if candidate / root == scale), nearest)
    factors = dict(zip(ORDER, config.mamba_multipliers, strict=True))
    attention_out, ssm_out = config.parallel_mixer_multipliers
    return {
        **dict(zip(SINGLE, (key, 1.0, attention_out, 1.0, ssm_out), strict=True)),
        "ssm_multipliers": [factors[index] for index in sorted(ORDER)],
        "mlp_multipliers": list(config.mlp_multipliers),
    }


LAYERS = KeyRule(
    _layers,
    _layers_json,
    {
        **dict.fromkeys(("num_hidden_layers", "mamba_n_heads", "mamba_expand", "mamba_d_ssm"), COUNT),
        **dict.fromkeys(("mamba_rms_norm", "mamba_norm_before_gate"), SWITCH),
        "mamba_d_head": HEAD_SIZE,
    },
)
MULTIPLIERS = KeyRule(
    _multipliers,
    _multipliers_json,
    {
        **dict.fromkeys(SINGLE, POSITIVE),
        "ssm_multipliers": _factors_of(5),
        "mlp_multipliers": _factors_of(2),
    },
)
