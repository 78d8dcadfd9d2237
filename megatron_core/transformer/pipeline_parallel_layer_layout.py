"""For Megatron Core's users: an explicit layout of layers."""

from megatron_core.parallel.layer_layout import PipelineParallelLayerLayout as PipelineParallelLayerLayout
