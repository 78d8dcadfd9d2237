"""Not available: Ulysses."""

from deepspeed.unavailable import refuse

refuse("deepspeed.runtime.sequence_parallel", "use --context-parallel-size (docs/context_parallel.md)")
