"""For Megatron Core's users: forward and backward of all micro-batches; one function runs every layout."""

from megatron_core.pipeline_parallel.forward_backward import (
    forward_backward,
)
from megatron_core.pipeline_parallel.forward_backward import (
    get_forward_backward_func as get_forward_backward_func,
)

forward_backward_no_pipelining = forward_backward
forward_backward_pipelining_without_interleaving = forward_backward
forward_backward_pipelining_with_interleaving = forward_backward
