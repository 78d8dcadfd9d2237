"""The specification of hybrid models: the parts of the layers follow from the pattern."""

from megatron.core.models.hybrid.hybrid_block import HybridStack
from megatron.core.transformer.spec_utils import ModuleSpec

hybrid_stack_spec = hybrid_inference_stack_spec = ModuleSpec(module=HybridStack)
