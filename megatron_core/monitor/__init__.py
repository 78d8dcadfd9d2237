"""Events of a run and their sinks: console and JSON Lines."""

from typing import TYPE_CHECKING

from megatron_core.monitor.events import Sink, StepEvent, ValidationEvent
from megatron_core.monitor.sinks import JsonLinesSink, SinkContext, build_sinks
from megatron_core.moved import old_names_of

if not TYPE_CHECKING:
    __getattr__ = old_names_of(__name__)
