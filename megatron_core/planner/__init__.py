"""Predict time and memory of a layout from its configuration: no torch."""

from megatron_core.planner.memory import layer_activations, state_by_kind
