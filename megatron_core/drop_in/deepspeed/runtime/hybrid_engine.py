"""Not available: the hybrid engine."""

from deepspeed.unavailable import refuse

refuse("deepspeed.runtime.hybrid_engine", "use megatron-serve for generation (docs/generation.md)")
