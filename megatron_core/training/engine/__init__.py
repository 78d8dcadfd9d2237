"""Train any ``nn.Module``: ZeRO, mixed precision, accumulation and checkpoints behind a loop of five lines."""

from megatron_core.training.engine.engine import Engine, StepReport
from megatron_core.training.engine.initialize import Initialized, initialize

__all__ = ["Engine", "Initialized", "StepReport", "initialize"]
