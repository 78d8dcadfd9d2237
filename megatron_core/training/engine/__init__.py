"""Train any ``nn.Module``: ZeRO, mixed precision, accumulation and checkpoints behind a loop of five lines."""

from megatron_core.training.engine.engine import Engine, Initialized, StepReport, initialize

__all__ = ["Engine", "Initialized", "StepReport", "initialize"]
