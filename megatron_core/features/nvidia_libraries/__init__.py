"""NVIDIA's apex and Transformer Engine as backends of fused operations."""

from megatron_core.feature import Feature

NVIDIA_LIBRARIES = Feature(
    name="nvidia_libraries",
    is_used=lambda config: config.model.kernel_backend in ("apex", "transformer_engine"),
    kernel_backends="megatron_core.features.nvidia_libraries.libraries:LIBRARIES",
)
