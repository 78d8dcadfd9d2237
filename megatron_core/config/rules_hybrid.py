"""Rules for --hybrid-layer-pattern, whose layers have one part each, and for Mamba-2 mixers."""

from collections.abc import Iterator
from math import inf

from megatron_core.config.hybrid import AHEAD, LATENT, LETTERS, STAGE, read_pattern
from megatron_core.config.mixers import Mamba2
from megatron_core.config.model import ModelConfig
from megatron_core.config.rules_parallel import uneven
from megatron_core.config.run import RunConfig


def hybrid_problems(config: RunConfig) -> Iterator[str]:
    """Letters of the pattern, their number, other settings about the same, and sizes of Mamba-2 mixers."""
    model, pattern = config.model, config.model.hybrid_layer_pattern
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
    if model.moe_layer_freq != (1,):
        yield f"moe_layer_freq={model.moe_layer_freq} cannot be used with {named}, where E means experts; remove it"
    if "E" in pattern + (model.mtp_layer_pattern or "") and model.num_experts is None:
        yield f"{named} has layers E with experts, and num_experts=None; add --num-experts N"
    if AHEAD not in pattern and (model.mtp_num_layers is None) != (model.mtp_layer_pattern is None):
        yield (
            f"mtp_num_layers={model.mtp_num_layers} and mtp_layer_pattern={model.mtp_layer_pattern} with {named}: give "
            "both or neither, or add /*- to the pattern for each layer of multi-token prediction"
        )
    if model.has_mamba:
        yield from _mamba_problems(model)


def _letter_problems(pattern: str, model: ModelConfig) -> Iterator[str]:
    named, unknown = f"hybrid_layer_pattern={pattern}", sorted(set(pattern) - set(LETTERS))
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
    heads, groups = Mamba2(model).heads, model.mamba_num_groups
    if min(model.mamba_head_dim, groups, model.hidden_size, heads) < 1:
        return  # reported as out of range
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
