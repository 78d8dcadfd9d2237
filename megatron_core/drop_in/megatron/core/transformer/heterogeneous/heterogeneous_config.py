"""A configuration for each layer from a file, which is not supported."""

from dataclasses import dataclass
from typing import Any

from megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs import get_gpt_heterogeneous_layer_spec
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass(init=False)
class HeterogeneousTransformerConfig(TransformerConfig):
    """Settings of a model with different layers; building an instance raises ConfigError."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        get_gpt_heterogeneous_layer_spec()
