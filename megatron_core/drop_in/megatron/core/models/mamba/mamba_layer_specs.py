"""State-space layers, which are not supported."""

from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec as mamba_stack_spec
