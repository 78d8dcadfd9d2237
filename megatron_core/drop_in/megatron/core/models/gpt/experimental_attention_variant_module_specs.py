"""The layers with experts and with linear attention."""

from typing import Any

from megatron_core.errors import ConfigError


def is_linear_attention_variant(experimental_attention_variant: str | None) -> bool:
    """Whether a name is Megatron Core's linear attention."""
    return experimental_attention_variant in ("gdn", "gdn2", "gated_delta_net")


def get_moe_layer_pattern(config: Any) -> list[int]:
    """Return 1 for each layer with experts, else 0: every ``moe_layer_freq``-th from the first, or its list."""
    freq = config.moe_layer_freq
    every = [int(layer % freq == 0) for layer in range(config.num_layers)] if isinstance(freq, int) else None
    return every or _listed("moe_layer_freq", freq, config.num_layers)


def get_linear_attention_pattern(config: Any) -> list[int]:
    """Return 1 for each layer with linear attention; every ``linear_attention_freq``-th has softmax, or its list.

    Without a frequency all layers have softmax; ConfigError (a ValueError) if the variant is linear attention.
    """
    freq, layers = config.linear_attention_freq, config.num_layers
    if freq is None:
        variant = config.experimental_attention_variant
        if is_linear_attention_variant(variant):
            raise ConfigError(f"linear_attention_freq is None, but experimental_attention_variant={variant}; set it")
        return [0] * layers
    every = [int((layer + 1) % freq != 0) for layer in range(layers)] if isinstance(freq, int) else None
    return every or _listed("linear_attention_freq", freq, layers)


def _listed(name: str, freq: Any, layers: int) -> list[int]:
    if not isinstance(freq, list):
        raise ConfigError(f"Invalid {name}: {freq!r}; give an integer or a list with one number for each layer")
    if len(freq) != layers:
        raise ConfigError(f"Invalid length of {name}: {len(freq)} numbers for num_layers={layers}; give one for each")
    return freq
