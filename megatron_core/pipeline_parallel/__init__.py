"""The executor of pipeline schedules, its messages, and which layers each stage has; two names of Megatron Core's."""

from megatron_core.enums import LayerType
from megatron_core.parallel.layer_layout import PipelineParallelLayerLayout
from megatron_core.pipeline_parallel.forward_backward import get_forward_backward_func
