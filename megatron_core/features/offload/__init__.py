"""Weights, optimizer state and activations in host memory or on disk."""

from megatron_core.feature import Feature
from megatron_core.features.offload.rules import describe_offload

OFFLOAD = Feature(
    name="offload",
    is_used=lambda config: (
        config.parallel.offloads_weights
        or config.optimizer.offloads_optimizer
        or config.model.cpu_offloading_num_layers > 0
    ),
    describe=describe_offload,
    convert_layers="megatron_core.features.offload.activations:offload_block",
    memory="megatron_core.features.offload.pipeline:offloaded_memory",
)
