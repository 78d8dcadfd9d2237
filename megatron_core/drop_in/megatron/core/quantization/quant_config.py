"""Quantization recipes by layer, which are not supported."""

from megatron_core.drop_in.unsupported import Unsupported

_MESSAGE = "quantization recipes by layer are not supported; set fp8 and fp8_recipe, with first_last_layers_bf16"


class RecipeConfig(Unsupported):
    """Stands for Megatron's class; building it raises ConfigError."""

    message = _MESSAGE


class QuantizationConfig(Unsupported):
    """Stands for Megatron's class; building it raises ConfigError."""

    message = _MESSAGE


class Matcher(Unsupported):
    """Stands for Megatron's class; building it raises ConfigError."""

    message = _MESSAGE


class GlobMatcher(Matcher):
    """Stands for Megatron's class; building it raises ConfigError."""


class MatchContext(Unsupported):
    """Stands for Megatron's class; building it raises ConfigError."""

    message = _MESSAGE
