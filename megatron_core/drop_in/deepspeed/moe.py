"""Not available: layers with experts."""

from deepspeed.unavailable import refuse

refuse("deepspeed.moe", "use the expert layers of megatron_core.transformer.moe (docs/experts.md)")
