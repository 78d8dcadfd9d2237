"""Not available: the hybrid engine."""

from deepspeed.unavailable import refuse

refuse("deepspeed.runtime.hybrid_engine", "use tools/serve.py for generation (docs/generation.md)")
