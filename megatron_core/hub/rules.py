"""Rules for checkpoints in formats of other programs, and the models that Megatron-LM cannot train."""

from collections.abc import Iterator

from megatron_core.config.model import ModelConfig
from megatron_core.config.run import RunConfig
from megatron_core.locations import path_of

# This module is loaded with the configuration, also by a package without one of the features. It reads their settings
# by name, not by class.

ABSENT = (
    *("parallel_residual", "norm_placement", "qk_layernorm_over_heads", "qk_layernorm_weight_per_head"),
    *("qk_l2_norm_rotary_only", "disable_bias_layernorm", "latent_norm_epsilon", "add_attention_output_bias"),
    *("add_output_layer_bias", "geglu", "scale_embeddings", "embedding_multiplier", "residual_multiplier"),
    *("logit_multiplier", "softmax_scale", "attn_logit_softcapping", "final_logit_softcapping", "attention_kind"),
    *("attention_chunk_size", "query_temperature_scale", "rotary_base_of_windows", "moe_router_group_score_topk"),
    *("yarn_attention_factor", "mlp_multipliers", "mamba_output_norm", "mamba_multipliers"),
    *("parallel_mixer_multipliers", "moe_router_sum_epsilon", "disable_weight_layernorm"),
    *("embedding_layernorm", "relu", "xielu", "qk_layernorm_after_rotary", "value_head"),
)
"""Settings of the model's function that Megatron-LM's arguments do not have."""

LETTERS_IT_LACKS, LETTERS_OF_MAMBA = "HC", "MH"
"""Letters of --hybrid-layer-pattern for layers that Megatron Core does not have, and with a Mamba-2 mixer."""
FIXED_OF_MAMBA = {"mamba_dt_min": 0.0, "mamba_dt_max": None, "linear_conv_kernel_dim": 4, "norm_epsilon": 1e-5}
"""Settings that Megatron-LM's Mamba-2 mixers do not read, and the values that they have there: steps are not bounded,
and the norm after the gate has an epsilon of its own."""
FIXED_OF_DELTA_NETS = {"swiglu": True}
"""Settings with which a gated delta net is the one of Megatron Core -> their only values."""


def format_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    """Settings with which --ckpt-format cannot write checkpoints."""
    checkpoint = config.checkpoint
    if checkpoint.ckpt_format == "native" or checkpoint.save is None:
        return
    named = f"ckpt_format={checkpoint.ckpt_format}"
    if path_of(checkpoint.save) is None:
        yield f"{named} cannot be written to save={checkpoint.save}; give a local folder, or remove --ckpt-format"
    if checkpoint.ckpt_format == "torch_dist":
        for reason in unlike_megatron(config.model):
            yield f"{named} does not write {reason}; use torch_dcp, or remove --ckpt-format"
    if (rank := config.optional("lora_rank")) is not None:
        yield f"{named} does not write low-rank adapters: lora_rank={rank}; remove --ckpt-format"


def unlike_megatron(model: ModelConfig) -> Iterator[str]:
    """The settings of a model whose training cannot continue in Megatron-LM."""
    if model.experimental_attention_variant == "kimi_delta_attention":
        yield f"experimental_attention_variant={model.experimental_attention_variant}"
    pattern = _pattern_of(model)
    for letter in LETTERS_IT_LACKS:
        if letter in pattern:
            yield f"hybrid_layer_pattern={pattern}, whose layers {letter} Megatron Core lacks"
    if settings := without_arguments(model):
        yield f"{', '.join(settings)}, which Megatron-LM has no settings for"


def _pattern_of(model: ModelConfig) -> str:
    """The kind of each layer as a letter; "" if all layers have attention and an MLP."""
    return vars(model).get("hybrid_layer_pattern") or ""


def without_arguments(model: ModelConfig) -> list[str]:
    """Settings of ``model``, as NAME=VALUE, for which Megatron-LM has no arguments: it would train another model."""
    settings = vars(model)
    plain = vars(ModelConfig())
    differing = [f"{name}={settings[name]}" for name in ABSENT if settings.get(name) != plain.get(name)]
    has_sparse_attention = model.experimental_attention_variant == "dsa"
    if settings.get("dsa_indexer_warmup"):
        differing.append("dsa_indexer_warmup=True")
    if has_sparse_attention and not settings["dsa_indexer_loss_coeff"]:  # Adam decays indexers without a loss there
        differing.append(f"dsa_indexer_loss_coeff={settings['dsa_indexer_loss_coeff']}")
    letters = _pattern_of(model)
    if has_sparse_attention and letters:
        differing.append(f"hybrid_layer_pattern={letters} with experimental_attention_variant=dsa")
    if model.position_embedding_type == "alibi":
        differing.append("position_embedding_type=alibi")
    if settings.get("use_rope_scaling") and settings["rope_scaling_type"] not in ("llama3", "yarn"):
        differing.append(f"rope_scaling_type={settings['rope_scaling_type']}")
    if settings.get("num_experts") and settings["moe_router_score_function"] == "sparsemixer":
        differing.append("moe_router_score_function=sparsemixer")
    pattern = settings.get("linear_attention_freq") or (1,)
    recurs_last = model.num_layers % max(pattern[0], 1) > 0 if len(pattern) == 1 else pattern[-1] == 1
    if model.added_layers and recurs_last:
        differing.append(f"mtp_num_layers={model.added_layers} with a recurrence in the last layer")
    fixed = FIXED_OF_MAMBA if set(LETTERS_OF_MAMBA) & set(letters) else {}
    differing += [f"{name}={value}" for name, only in fixed.items() if (value := getattr(model, name)) != only]
    return differing + unlike_delta_net(model)


def unlike_delta_net(model: ModelConfig) -> list[str]:
    """Settings of ``model``, as NAME=VALUE, with which gated delta nets compute something else in Megatron Core.

    It takes the activation of the model for the gates of heads.
    """
    has_nets = model.experimental_attention_variant == "gated_delta_net" or "G" in _pattern_of(model)
    differing = [
        f"{name}={value}" for name, only in FIXED_OF_DELTA_NETS.items() if (value := getattr(model, name)) != only
    ]
    return [f"{setting} with gated delta nets" for setting in differing] if has_nets else []
