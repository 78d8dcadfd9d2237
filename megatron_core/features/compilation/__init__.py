"""torch.compile of layers (--compile)."""

from megatron_core.feature import Feature

COMPILATION = Feature(
    name="compilation",
    is_used=lambda config: config.training.compile,
    convert_layers="megatron_core.features.compilation.layers:compile_block",
)
