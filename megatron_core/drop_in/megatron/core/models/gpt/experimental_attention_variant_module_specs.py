"""Layer specifications of Megatron Core's experimental attention, which is not supported."""

from typing import Any, NoReturn

from megatron_core.errors import ConfigError


def get_transformer_layer_with_experimental_attention_variant_spec(config: Any, *args: Any, **kwargs: Any) -> NoReturn:
    """Raise ConfigError: experimental attention is not supported."""
    variant = getattr(config, "experimental_attention_variant", None)
    raise ConfigError(f"experimental_attention_variant={variant!r} is not supported; leave it out")


get_transformer_block_with_experimental_attention_variant_spec = (
    get_transformer_layer_with_experimental_attention_variant_spec
)
