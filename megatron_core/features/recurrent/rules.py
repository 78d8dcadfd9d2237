"""Use and rules of layers with a recurrence, and of --hybrid-layer-pattern, whose layers have one part each."""

from collections.abc import Iterator
from math import inf

from megatron_core.config.model import ModelConfig
from megatron_core.config.rule_helpers import uneven
from megatron_core.config.run import RunConfig
from megatron_core.features.recurrent.settings import AHEAD, BOTH, LATENT, LETTERS, RECURRENCES, STAGE, read_pattern

REFUSED = {
    "use_mup": "multipliers of muP are those of attention; remove --use-mup",
    "fp8_format": "the widths of the projections of recurrences do not consist of whole blocks; remove --fp8-format",
    "compile": "the loop over chunks is not compiled; remove --compile",
}
"""Settings that cannot be used with recurrent layers or layers with one part, with the reason and the remedy."""


def has_recurrence(config: RunConfig) -> bool:
    """Whether a layer of the model has a recurrence."""
    return config.model.has_recurrence


def recurrent_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    """Settings of recurrent layers, or of a pattern of layers, that contradict each other or the layout."""
    yield from _pattern_problems(config)
    model = config.model
    parallel = config.parallel
    variant = model.experimental_attention_variant
    pattern = model.hybrid_layer_pattern
    if pattern is None and (variant is None or model.has_sparse_attention):
        return
    if variant is not None and pattern is None:
        yield from _variant_problems(model, variant)
    named = f"experimental_attention_variant={variant}" if pattern is None else f"hybrid_layer_pattern={pattern}"
    tp = parallel.tensor_model_parallel_size
    chunks = 2 * parallel.context_parallel_size
    if model.may_have("G"):
        yield from uneven(
            "linear_num_value_heads", model.linear_num_value_heads, "linear_num_key_heads", model.linear_num_key_heads
        )
        yield from uneven("linear_num_key_heads", model.linear_num_key_heads, "tensor_model_parallel_size", tp)
    growth = config.data.length_growth
    shortest = min(config.data.seq_length, growth.at(0)) if growth.is_sound else config.data.seq_length
    short = shortest // chunks < model.linear_conv_kernel_dim - 1
    if chunks > 2 and short and model.may_have(*RECURRENCES):
        name = "seq_length" if shortest == config.data.seq_length else "the START of seq_length_warmup"
        yield (
            f"{name}={shortest} in {chunks} parts for context_parallel_size={chunks // 2} is shorter "
            f"than the {model.linear_conv_kernel_dim - 1} earlier tokens of linear_conv_kernel_dim="
            f"{model.linear_conv_kernel_dim}; use longer sequences or fewer ranks"
        )
    for name, reason in REFUSED.items():
        if value := config.optional(name):
            yield f"{name}={value} cannot be used with {named}: {reason}"


def _variant_problems(model: ModelConfig, variant: str) -> Iterator[str]:
    """Which layers have the recurrence --experimental-attention-variant."""
    pattern = model.linear_attention_freq
    if pattern is None:
        yield (
            f"experimental_attention_variant={variant} needs linear_attention_freq; for example 4: every fourth layer "
            "has attention, the others the recurrence"
        )
        return
    if pattern[:1] < (1,) if len(pattern) == 1 else len(pattern) != model.num_layers or set(pattern) - {0, 1}:
        yield (
            f"linear_attention_freq={pattern} must be one number n >= 1 (every n-th layer has attention), or 1 "
            f"(recurrence) or 0 (attention) for each of num_layers={model.num_layers}"
        )
        return
    if not model.has_recurrence:
        yield (
            f"experimental_attention_variant={variant} has no effect with linear_attention_freq={pattern}, which gives "
            "no layer the recurrence; choose another pattern, or remove it"
        )
    if variant == "kimi_delta_attention" and model.linear_num_value_heads != model.linear_num_key_heads:
        yield (
            f"linear_num_value_heads={model.linear_num_value_heads} must be linear_num_key_heads="
            f"{model.linear_num_key_heads} with experimental_attention_variant={variant}: each value head has its own "
            "key head"
        )


def _pattern_problems(config: RunConfig) -> Iterator[str]:
    """Letters of the pattern, their number, other settings about the same, and sizes of Mamba-2 mixers."""
    model = config.model
    pattern = config.model.hybrid_layer_pattern
    for name in ("mlp_multipliers", "mamba_multipliers", "parallel_mixer_multipliers"):
        if not all(0 < value < inf for value in getattr(model, name)):
            yield f"{name}={getattr(model, name)} must be finite numbers above 0"
    if pattern is None:
        return
    named = f"hybrid_layer_pattern={pattern}"
    yield from _letter_problems(pattern, model)
    if (variant := model.experimental_attention_variant) is not None and not model.has_sparse_attention:
        yield (
            f"experimental_attention_variant={variant} cannot be used with {named}: write G for a layer with a gated "
            "delta net; remove one of them"
        )
    if model.parallel_residual:
        yield f"parallel_residual=True cannot be used with {named}: a layer has one part; remove one of them"
    if model.linear_attention_freq is not None and variant in (None, "dsa"):
        yield f"linear_attention_freq={model.linear_attention_freq} cannot be used with {named}; remove one of them"
    frequency, experts = config.optional("moe_layer_freq"), config.optional("num_experts")
    if frequency not in (None, (1,)):
        yield f"moe_layer_freq={frequency} cannot be used with {named}, where E means experts; remove it"
    if "E" in pattern + (model.mtp_layer_pattern or "") and experts is None:
        yield f"{named} has layers E with experts, and num_experts=None; add --num-experts N"
    if experts is not None and not model.may_have_feed_forward("experts"):
        yield (
            f"num_experts={experts} has no effect with {named}, which has no layer E; write E for each layer "
            "with experts, or remove --num-experts"
        )
    if AHEAD not in pattern and (model.mtp_num_layers is None) != (model.mtp_layer_pattern is None):
        yield (
            f"mtp_num_layers={model.mtp_num_layers} and mtp_layer_pattern={model.mtp_layer_pattern} with {named}: give "
            "both or neither, or add /*- to the pattern for each layer of multi-token prediction"
        )
    if model.has_mamba:
        yield from _mamba_problems(model)


def _letter_problems(pattern: str, model: ModelConfig) -> Iterator[str]:
    named = f"hybrid_layer_pattern={pattern}"
    unknown = sorted(set(pattern) - set(LETTERS))
    legal = f"legal: {' '.join(LETTERS)}, one for each layer"
    if STAGE in unknown:  # flags and files are translated
        letters, implied = read_pattern(pattern)
        settings = ", ".join(f"{name}={value}" for name, value in {"hybrid_layer_pattern": letters, **implied}.items())
        yield f"{named} has stages, which are another setting here; give {settings}"
    elif set(LATENT) & set(unknown):
        yield (
            f"{named}: attention layers are of one kind; write * for all, alone, with --multi-latent-attention, or "
            "also with --experimental-attention-variant dsa"
        )
    elif AHEAD in unknown:
        flag = f" and --mtp-num-layers {model.mtp_num_layers}" if model.mtp_num_layers else ""
        yield (
            f"{named}{flag}: layers of multi-token prediction, after /, are all alike, attention and an MLP (/*-) or "
            "experts (/*E); change or remove them, and remove --mtp-num-layers, which is their number"
        )
    elif not pattern:
        yield f"hybrid_layer_pattern='' is empty; {legal}"
    elif unknown:
        capitals = " (capitals)" if {letter.upper() for letter in unknown} & set(LETTERS) else ""
        yield f"{named} has the letters {' '.join(unknown)}; {legal}{capitals}"
    elif len(pattern) != model.num_layers:
        yield (
            f"num_layers={model.num_layers} must be {len(pattern)}, the number of letters in {named}; remove num_layers"
        )


def _mamba_problems(model: ModelConfig) -> Iterator[str]:
    groups = model.mamba_num_groups
    if model.mamba_mixer != "mamba2" and BOTH in (model.hybrid_layer_pattern or ""):
        yield (
            f"mamba_mixer={model.mamba_mixer} cannot be used with hybrid_layer_pattern={model.hybrid_layer_pattern}, "
            f"whose layers {BOTH} have Mamba-2 mixers; remove one of them"
        )
    if min(model.mamba_head_dim, groups, model.hidden_size) < 1:
        return  # reported as out of range
    heads = model.mamba_num_heads or 2 * model.hidden_size // model.mamba_head_dim
    if heads < 1:
        return
    if model.mamba_num_heads is None:
        yield from uneven(
            "2 x hidden_size",
            2 * model.hidden_size,
            "mamba_head_dim",
            model.mamba_head_dim,
            " (or set mamba_num_heads)",
        )
    if model.mamba_num_heads is not None or 2 * model.hidden_size % model.mamba_head_dim == 0:
        yield from uneven("mamba_num_heads", heads, "mamba_num_groups", groups)
    if model.mamba_dt_max is not None and model.mamba_dt_max < model.mamba_dt_min:
        yield f"mamba_dt_max={model.mamba_dt_max} is less than mamba_dt_min={model.mamba_dt_min}; exchange them"
