"""Rules for attention, positions, activations and the loss."""

from collections.abc import Iterator

from megatron_core.config.attention import ATTENTION_KINDS, AttentionKind, attention_of
from megatron_core.config.model import ModelConfig
from megatron_core.config.rule_helpers import uneven
from megatron_core.config.run import RunConfig


def model_problems(config: RunConfig) -> Iterator[str]:
    """Settings of heads, groups, positions, activations and the loss that contradict each other."""
    model = config.model
    attention = attention_of(model)
    if model.kv_channels is None and model.may_have_attention and not attention.has_own_head_sizes:
        yield from uneven(
            "hidden_size",
            model.hidden_size,
            "num_attention_heads",
            model.num_attention_heads,
            " (or set the width of a head with kv_channels)",
        )
    if model.group_query_attention:
        yield from uneven("num_attention_heads", model.num_attention_heads, "num_query_groups", model.query_groups)
    if model.attention_kind not in ATTENTION_KINDS:
        yield f"attention_kind={model.attention_kind} is unknown; legal: {', '.join(ATTENTION_KINDS)}"
    for name, reason in attention.refused.items():
        if value := getattr(model, name):
            yield f"{name}={value} cannot be used with attention_kind={attention.name}, {reason}; remove it"
    if model.parallel_residual_shared_norm and model.norm_placement != "pre":
        yield (
            f"parallel_residual_shared_norm=True cannot be used with norm_placement={model.norm_placement}, which has "
            "a norm for each output; use pre"
        )
    yield from _qk_norm_problems(model)
    yield from _position_problems(config, attention)
    yield from _window_problems(config)
    yield from _chunk_problems(config)
    chosen = [
        n
        for n in ("swiglu", "geglu", "quick_geglu", "squared_relu", "relu", "xielu", "openai_gelu")
        if getattr(model, n)
    ]
    if len(chosen) > 1 and chosen != ["geglu", "openai_gelu"]:
        yield f"{' and '.join(f'{name}=True' for name in chosen)} exclude one another; keep one activation"


def _qk_norm_problems(model: ModelConfig) -> Iterator[str]:
    """Norms of queries and keys."""
    if model.qk_layernorm_over_heads and (not model.qk_layernorm or model.normalization != "RMSNorm"):
        yield (
            f"qk_layernorm_over_heads=True needs qk_layernorm=True and normalization=RMSNorm; they are "
            f"{model.qk_layernorm} and {model.normalization}"
        )
    if model.qk_layernorm_weight_per_head and model.qk_layernorm_over_heads:
        yield "qk_layernorm_weight_per_head=True and qk_layernorm_over_heads=True exclude one another; keep one"
    if model.qk_l2_norm and model.qk_layernorm:
        yield "qk_l2_norm=True replaces the norms of qk_layernorm=True; remove one of them"


def _window_problems(config: RunConfig) -> Iterator[str]:
    """Sliding-window attention."""
    window, skip, layers = config.model.window_size, config.model.window_attn_skip_freq, config.model.num_layers
    if window is not None and (window[0] < -1 or window[1] not in (0, -1)):
        yield (
            f"window_size={window} must be the number of tokens before (-1: all) and after a token, and the second "
            "must be 0, because the model is causal; for example --window-size 127 0 for a window of 128"
        )
    if skip is None or window is None:
        return
    if len(skip) == 1 and skip[0] < 1:
        yield f"window_attn_skip_freq={skip} must be 1 or more: every n-th layer has full attention"
    elif len(skip) != 1 and (len(skip) != layers or set(skip) - {0, 1}):
        yield (
            f"window_attn_skip_freq={skip} must be one number n (every n-th layer has full attention), or 1 (window) "
            f"or 0 (full) for each of num_layers={layers}"
        )


def _chunk_problems(config: RunConfig) -> Iterator[str]:
    """Attention within chunks."""
    model = config.model
    if model.attention_chunk_size is None:
        return
    if model.window_size is not None:
        yield (
            f"attention_chunk_size={model.attention_chunk_size} cannot be used with window_size={model.window_size}; "
            "remove one of them"
        )
    if config.parallel.layout_invariant:
        yield (
            f"attention_chunk_size={model.attention_chunk_size} cannot be used with layout_invariant=True, which has "
            "no chunks in generation; remove --layout-invariant"
        )


def _position_problems(config: RunConfig, attention: AttentionKind) -> Iterator[str]:
    """Rotary channels, and the table of learned positions."""
    model, seq_length = config.model, config.data.seq_length
    if model.position_embedding_type == "alibi" and not model.bias_channels:
        yield "position_embedding_type=alibi needs the feature positions, which this package lacks; use rope"
    skip = model.no_rope_freq
    if skip is not None and (skip[0] < 1 if len(skip) == 1 else len(skip) != model.num_layers or set(skip) - {0, 1}):
        yield (
            f"no_rope_freq={skip} must be one number n >= 1 (every n-th layer has no rotary positions), or 1 (without) "
            f"or 0 (with) for each of num_layers={model.num_layers}"
        )
    if attention.has_rotary and model.num_attention_heads >= 1:
        head, settings = attention.rotary_head
        rotating = attention.rotary_channels if 0 < model.rotary_percent <= 1 else 2
        if rotating < 2 or rotating % 2:
            yield (
                f"rotary_percent={model.rotary_percent} of the {head} channels in a head gives "
                f"{rotating} rotating channels, which must be even and 2 or more; change rotary_percent, {settings}"
            )
    if model.position_embedding_type == "learned_absolute" and config.max_positions < seq_length:
        yield (
            f"max_position_embeddings={model.max_position_embeddings} is less than seq_length={seq_length}; "
            f"give {seq_length} or more, or remove the setting"
        )
