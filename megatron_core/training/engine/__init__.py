"""Train any ``nn.Module``: ZeRO, mixed precision, accumulation and checkpoints behind a loop of five lines."""

from megatron_core.training.engine.engine import Engine as Engine
from megatron_core.training.engine.initialize import Initialized as Initialized
from megatron_core.training.engine.initialize import initialize as initialize
from megatron_core.training.engine.initialize import parallelize as parallelize
from megatron_core.training.engine.layers import LayerSpec as LayerSpec
from megatron_core.training.engine.layers import PipelineModule as PipelineModule
from megatron_core.training.engine.layers import TiedLayerSpec as TiedLayerSpec
from megatron_core.training.engine.meta import meta_init as meta_init
from megatron_core.training.engine.monitoring import StepReport as StepReport
