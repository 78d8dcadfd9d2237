"""Rules for layers with a recurrence."""

from collections.abc import Iterator

from megatron_core.config.hybrid import RECURRENCES
from megatron_core.config.model import ModelConfig
from megatron_core.config.rules_parallel import uneven
from megatron_core.config.run import RunConfig

REFUSED = {
    "use_mup": "multipliers of muP are those of attention; remove --use-mup",
    "fp8_format": "the widths of the projections of recurrences do not consist of whole blocks; remove --fp8-format",
    "compile": "the loop over chunks is not compiled; remove --compile",
}
"""Settings that cannot be used with recurrent layers or layers with one part, with the reason and the remedy."""


def recurrent_problems(config: RunConfig) -> Iterator[str]:
    """Settings of recurrent layers that contradict each other or the layout."""
    model, parallel, flat = config.model, config.parallel, config.flat()
    kind, pattern = model.experimental_attention_variant, model.hybrid_layer_pattern
    if pattern is None and (kind is None or model.has_sparse_attention):
        return
    if kind is not None and pattern is None:
        yield from _variant_problems(model, kind)
    named = f"experimental_attention_variant={kind}" if pattern is None else f"hybrid_layer_pattern={pattern}"
    tp, parts = parallel.tensor_model_parallel_size, 2 * parallel.context_parallel_size
    if model.may_have("G"):
        yield from uneven(
            "linear_num_value_heads", model.linear_num_value_heads, "linear_num_key_heads", model.linear_num_key_heads
        )
        yield from uneven("linear_num_key_heads", model.linear_num_key_heads, "tensor_model_parallel_size", tp)
    short = config.data.seq_length // parts < model.linear_conv_kernel_dim - 1
    if parts > 2 and short and model.may_have(*RECURRENCES):
        yield (
            f"seq_length={config.data.seq_length} in {parts} parts for context_parallel_size={parts // 2} is shorter "
            f"than the {model.linear_conv_kernel_dim - 1} earlier tokens of linear_conv_kernel_dim="
            f"{model.linear_conv_kernel_dim}; use longer sequences or fewer ranks"
        )
    for name, reason in REFUSED.items():
        if flat[name]:
            yield f"{name}={flat[name]} cannot be used with {named}: {reason}"


def _variant_problems(model: ModelConfig, kind: str) -> Iterator[str]:
    """Which layers have the recurrence --experimental-attention-variant."""
    pattern = model.linear_attention_freq
    if pattern is None:
        yield (
            f"experimental_attention_variant={kind} needs linear_attention_freq; for example 4: every fourth layer has "
            "attention, the others the recurrence"
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
            f"experimental_attention_variant={kind} has no effect with linear_attention_freq={pattern}, which gives no "
            "layer the recurrence; choose another pattern, or remove it"
        )
    if kind == "kimi_delta_attention" and model.linear_num_value_heads != model.linear_num_key_heads:
        yield (
            f"linear_num_value_heads={model.linear_num_value_heads} must be linear_num_key_heads="
            f"{model.linear_num_key_heads} with experimental_attention_variant={kind}: each value head has its own key "
            "head"
        )
