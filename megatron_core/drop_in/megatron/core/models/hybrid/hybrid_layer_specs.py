"""State-space layers, which are not supported."""

from megatron.core.unsupported import unsupported

_MESSAGE = "state-space layers are not supported; use GPTModel"
hybrid_stack_spec = unsupported(_MESSAGE)
hybrid_inference_stack_spec = unsupported(_MESSAGE)
