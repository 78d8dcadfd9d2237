"""Not available: the inference engine."""

from deepspeed.unavailable import refuse

refuse("deepspeed.inference", "use tools/serve.py (docs/generation.md)")
