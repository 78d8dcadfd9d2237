"""Losses of the output layer: logits a few tokens at a time, and the z-loss, which keeps logits near 0."""

from megatron_core.feature import Feature
from megatron_core.features.output_losses.settings import HEAD, OutputLossConfig, output_loss_problems

OUTPUT_LOSSES = Feature(
    name="output_losses",
    settings=OutputLossConfig,
    is_used=lambda config: config.model.head_name == HEAD,
    problems=output_loss_problems,
    layers={HEAD: "megatron_core.features.output_losses.head:LossHead"},
)
