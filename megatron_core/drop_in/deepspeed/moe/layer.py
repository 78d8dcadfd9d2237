"""``MoE``, whose construction is refused."""

from deepspeed.unavailable import refused

MoE = refused("deepspeed.moe.layer.MoE", "use the expert layers of megatron_core.transformer.moe (docs/experts.md)")
