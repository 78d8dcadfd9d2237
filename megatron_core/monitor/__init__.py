"""Events of a run and what becomes of them: console, JSON Lines, TensorBoard, plots."""

from megatron_core.monitor.build import build_sinks
from megatron_core.monitor.events import Sink, StepEvent, ValidationEvent
from megatron_core.monitor.flops import flops_per_token, forward_flops_per_token
from megatron_core.monitor.jsonl import JsonLinesSink, read_metrics

__all__ = [
    "JsonLinesSink",
    "Sink",
    "StepEvent",
    "ValidationEvent",
    "build_sinks",
    "flops_per_token",
    "forward_flops_per_token",
    "read_metrics",
]
