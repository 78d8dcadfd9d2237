"""Lossy sums of gradients: PowerSGD, 1-bit Adam, 1-bit LAMB (an update of the feature ``lamb``), 0/1 Adam."""

from megatron_core.feature import Feature
from megatron_core.features.compression.rules import compression_problems
from megatron_core.features.compression.settings import KINDS, CompressionConfig, compresses

COMPRESSION = Feature(
    name="compression",
    settings=CompressionConfig,
    is_used=compresses,
    problems=compression_problems,
    compressions=KINDS,
    in_any_model=True,
)
