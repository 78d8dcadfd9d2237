"""Not available: automatic tuning."""

from deepspeed.unavailable import refuse

refuse("deepspeed.autotuning", "use megatron-plan (docs/planner.md)")
