"""Events for the tests of this folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_core.config import RunConfig
from megatron_core.monitor.events import StepEvent, ValidationEvent
from megatron_core.monitor.sinks import SinkContext


def step(iteration: int, **changes: Any) -> StepEvent:
    """A step that reads 4 sequences of 16 tokens."""
    values: dict[str, Any] = {
        "iteration": iteration,
        "total_iterations": 4,
        "consumed_samples": 4 * iteration,
        "consumed_tokens": 64 * iteration,
        "loss": 4.809311,
        "learning_rate": 5.5e-4,
        "global_batch_size": 4,
        "grad_norm": 1.257,
        "elapsed_ms": 41.0,
        "tokens_per_second": 1560.0,
        "model_flops_per_second": 2.5e12,
        "layout": "1 process",
    }
    return StepEvent(**{**values, **changes})


def validation(iteration: int, **changes: Any) -> ValidationEvent:
    """An evaluation."""
    values = {"loss": 4.634557, "consumed_samples": 4 * iteration, "consumed_tokens": 64 * iteration}
    return ValidationEvent(**{"iteration": iteration, **values, **changes})


def sink_context(folder: Path | None, logged: Mapping[str, Any], **settings: Any) -> SinkContext:
    """The context of a sink whose run has ``settings``."""
    return SinkContext(RunConfig.from_flat(RunConfig().flat() | settings), folder, logged=logged)
