"""Pipelines over ``megatron_core.PipelineModule`` and its engine."""

from deepspeed.runtime.pipe.module import LayerSpec as LayerSpec
from deepspeed.runtime.pipe.module import PipelineModule as PipelineModule
from deepspeed.runtime.pipe.module import TiedLayerSpec as TiedLayerSpec
from deepspeed.runtime.pipe.topology import ProcessTopology as ProcessTopology
