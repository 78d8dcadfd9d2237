"""Changes of the layout of a running model, which are not supported."""

from megatron.core.unsupported import unsupported

_MESSAGE = "changing the layout of a running model is not supported; save a checkpoint and load it in the other layout"
swap_model_weights = unsupported(_MESSAGE)
clear_all_caches = unsupported(_MESSAGE)
