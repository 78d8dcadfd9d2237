"""Pipeline schedules with Megatron Core's names."""

from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
