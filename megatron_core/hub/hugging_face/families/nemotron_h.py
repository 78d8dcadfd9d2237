"""Nemotron-H: layers with one part each: a Mamba-2 mixer, attention without positions, an MLP, or experts."""

from collections.abc import Iterator

from megatron_core.config import ModelConfig
from megatron_core.features.recurrent.kinds import Mamba2
from megatron_core.features.recurrent.settings import RecurrentConfig
from megatron_core.hub.hugging_face.architecture import register
from megatron_core.hub.hugging_face.families.mamba2 import INITIAL, LIMITS, MAMBA2, MIXER, PRECISION, limits
from megatron_core.hub.hugging_face.rules import (
    GROUP_TYPES,
    MTP_LAYERS,
    KeyRule,
    Settings,
    groups_json,
    limited_to_groups,
    refuse,
)
from megatron_core.hub.hugging_face.tensors import separate_qkv
from megatron_core.schema import COUNT, NUMBER, POSITIVE, STRING, STRINGS, WIDTH

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


def _experts_json(config: ModelConfig) -> Settings:
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


def _notes(hf_config: Settings, config: ModelConfig) -> Iterator[str]:
    """Say that the code published with these models bounds steps by another key."""
    config = config.section(RecurrentConfig)
    limit = hf_config.get("time_step_limit")
    if limit is None or "M" not in (config.hybrid_layer_pattern or ""):
        return
    settings = limits(hf_config)
    if settings != {
        "mamba_dt_min": config.mamba_dt_min,
        "mamba_dt_max": config.mamba_dt_max,
    }:
        flags = " ".join(
            f"--{name.replace('_', '-')} {value:g}" for name, value in settings.items() if value is not None
        )
        yield (
            f"time_step_limit={limit} has no effect: steps are between mamba_dt_min={config.mamba_dt_min:g} and "
            f"mamba_dt_max={config.mamba_dt_max}, by default from time_step_min as in transformers; the code published "
            f"with Nemotron models bounds them by time_step_limit instead: to compute as it does, give {flags}, with a "
            "converted checkpoint also --changed-model-settings mamba_dt_min mamba_dt_max"
        )


NEMOTRON_H = register(
    MAMBA2,
    model_type="nemotron_h",
    class_name="NemotronHForCausalLM",
    keys={
        "hidden_size": "hidden_size",
        "num_attention_heads": "num_attention_heads",
        "num_key_value_heads": "num_query_groups",
        "head_dim": "kv_channels",
        "intermediate_size": "ffn_hidden_size",
        "max_position_embeddings": "max_position_embeddings",
        "attention_dropout": "attention_dropout",
        "layer_norm_epsilon": "norm_epsilon",
        "mamba_num_heads": "mamba_num_heads",
        "mamba_head_dim": "mamba_head_dim",
        "ssm_state_size": "mamba_state_dim",
        "n_groups": "mamba_num_groups",
        "conv_kernel": "linear_conv_kernel_dim",
        "initializer_range": "init_method_std",
    },
    fixed={
        "normalization": "RMSNorm",
        "position_embedding_type": "none",
        "disable_bias_linear": True,
        "squared_relu": True,
        "hidden_dropout": 0.0,
    },
    # transformers bounds steps from below by time_step_min, and does not read time_step_limit (_notes) and expand.
    defaults={
        **INITIAL,
        **PRECISION,
        "layer_norm_epsilon": 1e-5,
        "head_dim": 128,
        "time_step_limit": None,
        "expand": 2,
        "hidden_dropout": 0.0,
        "use_mamba_kernels": True,
        "mamba_ssm_cache_dtype": "float32",
        "moe_shared_expert_overlap": True,
        "mtp_layers_block_type": None,
        "mtp_hybrid_override_pattern": None,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
        "moe_latent_size": None,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
    },
    required={
        "mlp_hidden_act": "relu2",
        "mamba_hidden_act": "silu",
        "use_conv_bias": True,
        "use_bias": False,
        "mlp_bias": False,
        "mamba_proj_bias": False,
        "attention_bias": False,
        "sliding_window": None,
        "norm_topk_prob": True,
        "n_shared_experts": 1,
    },
    aliases={
        "mamba_n_groups": "n_groups",
        "mamba_d_conv": "conv_kernel",
        "mamba_expand": "expand",
        "mamba_dt_min": "time_step_min",
        "mamba_chunk_size": "chunk_size",
    },
    rules=(
        KeyRule(
            _layers,
            _layers_json,
            {
                "hybrid_override_pattern": STRING,
                "layers_block_type": STRINGS,
                "num_hidden_layers": COUNT,
                "expand": COUNT,
                "chunk_size": COUNT,
            },
        ),
        KeyRule(_steps, _steps_json, {"time_step_min": NUMBER, "time_step_limit": LIMITS}),
        KeyRule(
            _experts,
            _experts_json,
            {
                **GROUP_TYPES,
                "routed_scaling_factor": POSITIVE,
                **dict.fromkeys(("n_routed_experts", "num_experts_per_tok"), COUNT),
                **dict.fromkeys(("moe_intermediate_size", "moe_shared_expert_intermediate_size"), WIDTH),
                "moe_latent_size": WIDTH,
            },
        ),
    ),
    layer_tensors={
        **MIXER,
        "pre_mlp_layernorm": "norm",
        "self_attention.linear_qkv": separate_qkv("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
        "self_attention.linear_proj": "mixer.o_proj",
        "mlp.linear_fc1": "mixer.up_proj",
        "mlp.linear_fc2": "mixer.down_proj",
        "mlp.router": "mixer.gate",
        "mlp.router.expert_bias": "mixer.gate.e_score_correction_bias",
        "mlp.fc1_latent_proj": "mixer.fc1_latent_proj",
        "mlp.fc2_latent_proj": "mixer.fc2_latent_proj",
        "mlp.experts.linear_fc1": "mixer.experts.{e}.up_proj",
        "mlp.experts.linear_fc2": "mixer.experts.{e}.down_proj",
        "mlp.shared_experts.linear_fc1": "mixer.shared_experts.up_proj",
        "mlp.shared_experts.linear_fc2": "mixer.shared_experts.down_proj",
    },
    derived=MAMBA2.derived,
    mtp_names=r"mtp\..*",
    mtp_layer_keys=MTP_LAYERS,
    notes=_notes,
)
