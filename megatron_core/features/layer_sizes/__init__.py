"""Layers with sizes of their own (--heterogeneous-layers-config-path)."""

from megatron_core.feature import Feature
from megatron_core.features.layer_sizes.rules import heterogeneous_problems
from megatron_core.features.layer_sizes.settings import HeterogeneousConfig

LAYER_SIZES = Feature(
    name="layer_sizes",
    settings=HeterogeneousConfig,
    is_used=lambda config: config.model.heterogeneous_layers_config_encoded_json is not None,
    spellings="megatron_core.features.layer_sizes.spellings:LayerSizesSpellings",
    problems=heterogeneous_problems,
    attention_kinds={"linear": "megatron_core.features.layer_sizes.sizes:LinearMixer"},
    feed_forwards={"linear": "megatron_core.features.layer_sizes.sizes:LinearFeedForward"},
    layers={"linear": "megatron_core.features.layer_sizes.linear_replacement:LinearReplacement"},
)
