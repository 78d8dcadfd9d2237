"""Nemotron-H: layers with one part each: a Mamba-2 mixer, attention without positions, an MLP, or experts."""

from collections.abc import Iterator

from megatron_core.config import ModelConfig
from megatron_core.features.experts.settings import MoEConfig
from megatron_core.features.recurrent.kinds import Mamba2
from megatron_core.features.recurrent.settings import RecurrentConfig
from megatron_core.foreign_json import COUNT, NUMBER, POSITIVE, STRING, STRINGS, WIDTH
from megatron_core.hub.hugging_face.families.mamba2 import LIMITS, limits
from megatron_core.hub.hugging_face.rules import GROUP_TYPES, KeyRule, Settings, groups_json, limited_to_groups, refuse

KINDS = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"}
"""Values of ``layers_block_type`` -> letters of the pattern."""
EARLIER = {"mamba": "M", "attention": "*"}
"""Names of earlier releases."""
NO_LEAST_STEP = 1e-20
"""``time_step_min`` for steps without a lower bound: `transformers` takes its logarithm for initial weights."""


def _layers(hf_config: Settings) -> Settings:
    pattern = hf_config.get("hybrid_override_pattern")
    kinds = hf_config.get("layers_block_type")
    if kinds is not None:
        letters = KINDS | EARLIER
        if set(kinds) - set(letters):
            refuse("layers_block_type", kinds, f"supported are {', '.join(KINDS)}")
        pattern = "".join(letters[layer_type] for layer_type in kinds)
    if not pattern or set(pattern) - set(KINDS.values()):
        refuse("hybrid_override_pattern", pattern, f"supported are {' '.join(KINDS.values())}, one for each layer")
    return {"num_layers": len(pattern), "hybrid_layer_pattern": pattern}


def _layers_json(config: ModelConfig) -> Settings:
    names = {letter: layer_type for layer_type, letter in KINDS.items()}
    pattern = config.section(RecurrentConfig).hybrid_layer_pattern or ""
    return {
        "layers_block_type": [names.get(letter, letter) for letter in pattern],
        "num_hidden_layers": config.num_layers,
        "mamba_num_heads": Mamba2(config).heads,
    }


def _experts(hf_config: Settings) -> Settings:
    """Settings of experts, which models without them have in config.json, too."""
    if "E" not in _layers(hf_config)["hybrid_layer_pattern"]:
        return {}
    return {
        "num_experts": hf_config["n_routed_experts"],
        "moe_router_topk": hf_config["num_experts_per_tok"],
        "moe_ffn_hidden_size": hf_config["moe_intermediate_size"],
        "moe_shared_expert_intermediate_size": hf_config["moe_shared_expert_intermediate_size"],
        "moe_latent_size": hf_config.get("moe_latent_size"),
        "moe_router_topk_scaling_factor": float(hf_config["routed_scaling_factor"]),
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_aux_loss_coeff": 0.0,
        **limited_to_groups(hf_config["n_group"], hf_config["topk_group"], 2),
    }


def _experts_json(config: MoEConfig) -> Settings:
    if config.num_experts is None:
        return {}
    return {
        "n_routed_experts": config.num_experts,
        "num_experts_per_tok": config.moe_router_topk,
        "moe_intermediate_size": config.expert_ffn_size,
        "moe_shared_expert_intermediate_size": config.moe_shared_expert_intermediate_size,
        "moe_latent_size": config.moe_latent_size,
        "routed_scaling_factor": config.moe_router_topk_scaling_factor or 1.0,
        **groups_json(config),
    }


def _steps(hf_config: Settings) -> Settings:
    least = hf_config["time_step_min"]
    return {"mamba_dt_min": 0.0 if least <= NO_LEAST_STEP else float(least)}


def _steps_json(config: ModelConfig) -> Settings:
    return {"time_step_min": config.section(RecurrentConfig).mamba_dt_min or NO_LEAST_STEP}


def notes_on_steps(hf_config: Settings, config: ModelConfig) -> Iterator[str]:
    """Say that the code published with these models bounds steps by another key."""
    config = config.section(RecurrentConfig)
    limit = hf_config.get("time_step_limit")
    if limit is None or "M" not in (config.hybrid_layer_pattern or ""):
        return
    settings = limits(hf_config)
    if settings != {"mamba_dt_min": config.mamba_dt_min, "mamba_dt_max": config.mamba_dt_max}:
        flags = " ".join(
            f"--{name.replace('_', '-')} {value:g}" for name, value in settings.items() if value is not None
        )
        yield (
            f"time_step_limit={limit} has no effect: steps are between mamba_dt_min={config.mamba_dt_min:g} and "
            f"mamba_dt_max={config.mamba_dt_max}, by default from time_step_min as in transformers; the code published "
            f"with Nemotron models bounds them by time_step_limit instead: to compute as it does, give {flags}, with a "
            "converted checkpoint also --changed-model-settings mamba_dt_min mamba_dt_max"
        )


LAYERS = KeyRule(
    _layers,
    _layers_json,
    {
        "hybrid_override_pattern": STRING,
        "layers_block_type": STRINGS,
        **dict.fromkeys(("num_hidden_layers", "expand", "chunk_size"), COUNT),
    },
)
STEPS = KeyRule(_steps, _steps_json, {"time_step_min": NUMBER, "time_step_limit": LIMITS})
EXPERTS = KeyRule(
    _experts,
    _experts_json,
    {
        **GROUP_TYPES,
        "routed_scaling_factor": POSITIVE,
        **dict.fromkeys(("n_routed_experts", "num_experts_per_tok"), COUNT),
        **dict.fromkeys(("moe_intermediate_size", "moe_shared_expert_intermediate_size", "moe_latent_size"), WIDTH),
    },
)
