"""The executor of pipeline schedules, its messages, and the layers of each stage."""

from megatron_core.pipeline_parallel.forward_backward import get_forward_backward_func
