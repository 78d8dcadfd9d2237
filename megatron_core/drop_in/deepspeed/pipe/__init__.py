"""Pipelines under their short names."""

from deepspeed.runtime.pipe import LayerSpec as LayerSpec
from deepspeed.runtime.pipe import PipelineModule as PipelineModule
from deepspeed.runtime.pipe import TiedLayerSpec as TiedLayerSpec
from deepspeed.runtime.pipe import topology as topology
