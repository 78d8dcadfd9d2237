"""Not available: Ulysses."""

from deepspeed.unavailable import refuse

refuse("deepspeed.sequence", "use --context-parallel-size (docs/context_parallel.md)")
