"""Not available: automatic tuning."""

from deepspeed.unavailable import refuse

refuse("deepspeed.autotuning", "use tools/plan_layout.py (docs/planner.md)")
