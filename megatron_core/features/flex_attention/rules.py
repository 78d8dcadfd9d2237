"""Rules of FlexAttention."""

from collections.abc import Iterator

from megatron_core.config.run import RunConfig


def flex_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    """Settings that FlexAttention excludes."""
    model = config.model
    excluded = {
        f"attention_dropout={model.attention_dropout}": (model.attention_dropout, "it has none; use 0"),
        "layout_invariant=True": (config.parallel.layout_invariant, "it has its own order of sums; remove it"),
        f"softmax_type={model.softmax_type}": (model.has_sinks, "it has no sinks"),
    }
    for setting, (is_given, reason) in excluded.items():
        if is_given and model.attention_backend == "flex":
            yield f"{setting} cannot be used with attention_backend=flex: {reason}, or use --attention-backend auto"
