"""Events of a run and their sinks: console, JSON Lines, TensorBoard; plots."""

from megatron_core.monitor.build import build_sinks
from megatron_core.monitor.events import Sink, StepEvent, ValidationEvent
from megatron_core.monitor.jsonl import JsonLinesSink, read_metrics
