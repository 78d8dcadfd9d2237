"""Not available: fused transformer layers."""

from deepspeed.unavailable import refuse

refuse(
    "deepspeed.ops.transformer",
    "use torch.nn.functional.scaled_dot_product_attention or the layers of megatron_core.transformer",
)
