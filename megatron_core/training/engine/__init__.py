"""Train any ``nn.Module``: ZeRO, mixed precision, accumulation and checkpoints behind a loop of five lines."""

from megatron_core.training.engine.engine import Engine as Engine
from megatron_core.training.engine.engine import StepReport as StepReport
from megatron_core.training.engine.initialize import Initialized as Initialized
from megatron_core.training.engine.initialize import initialize as initialize
from megatron_core.training.engine.initialize import parallelize as parallelize
