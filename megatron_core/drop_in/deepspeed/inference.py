"""Not available: the inference engine."""

from deepspeed.unavailable import refuse

refuse("deepspeed.inference", "use megatron-serve (docs/generation.md)")
