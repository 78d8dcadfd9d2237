"""Layer specifications from a file for each layer, which are not supported."""

from typing import Any, NoReturn

from megatron_core.errors import ConfigError


def get_gpt_heterogeneous_layer_spec(config: Any, *args: Any, **kwargs: Any) -> NoReturn:
    """Raise ConfigError: files that describe each layer are not supported."""
    raise ConfigError(
        "heterogeneous_layers_config_path is not supported; build TransformerBlockSubmodules(layer_specs=[...]) with "
        "one specification for each layer"
    )
