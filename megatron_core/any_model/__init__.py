"""Train any ``nn.Module``: ZeRO, mixed precision, accumulation and checkpoints behind a loop of five lines."""

from megatron_core.any_model.engine import Engine as Engine
from megatron_core.any_model.initialize import Initialized as Initialized
from megatron_core.any_model.initialize import initialize as initialize
from megatron_core.any_model.initialize import parallelize as parallelize
from megatron_core.any_model.layers import LayerSpec as LayerSpec
from megatron_core.any_model.layers import PipelineModule as PipelineModule
from megatron_core.any_model.layers import TiedLayerSpec as TiedLayerSpec
from megatron_core.any_model.module import meta_init as meta_init
from megatron_core.any_model.monitoring import StepReport as StepReport
