"""The specification of hybrid models under its earlier name."""

from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec as mamba_stack_spec
