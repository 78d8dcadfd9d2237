"""Models by name (--model-preset) or by their number of layers (--depth)."""

from megatron_core.feature import Feature, Shorthand
from megatron_core.features.presets.depth import read_depth
from megatron_core.features.presets.published import read_preset

MODEL_PRESETS = Feature(
    name="presets",
    is_used=lambda config: False,  # nothing is left of them in a configuration
    shorthands={
        "model_preset": Shorthand(
            "Name of a published model, such as llama3-8b: its shape, vocabulary size and sequence length are the "
            "defaults. --config and flags override them.",
            read_preset,
        ),
        "depth": Shorthand(
            "Number of layers of a model whose width, heads, learning rate (muP), batch size and number of steps "
            "follow from it (docs/model_size.md). --config and flags override them.",
            read_depth,
        ),
    },
)
