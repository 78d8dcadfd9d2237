"""Not available: the FLOPs profiler."""

from deepspeed.unavailable import refuse

refuse("deepspeed.profiling", "use torch.profiler or megatron-diagnose (docs/monitoring.md)")
