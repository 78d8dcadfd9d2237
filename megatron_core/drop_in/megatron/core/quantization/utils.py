"""Quantization recipes by layer, which are not supported."""

from typing import Any

from megatron_core.drop_in.unsupported import unsupported
from megatron_core.errors import ConfigError

_MESSAGE = "quantization recipes by layer are not supported; set fp8 and fp8_recipe, with first_last_layers_bf16"
load_quantization_recipe = unsupported(_MESSAGE)


def get_quant_config_or_none(module_path: str, recipe: Any = None) -> None:
    """Return None without a recipe; ConfigError with one."""
    if recipe is not None:
        raise ConfigError(_MESSAGE)
