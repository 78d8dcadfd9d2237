"""What a layout will take, from its configuration alone: no torch."""

from megatron_core.planner.memory import layer_activations, peak_activation_bytes, state_by_kind
