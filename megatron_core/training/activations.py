"""For Megatron-LM's users: activation functions under their former path."""

from megatron_core.lazy import names_of

__getattr__ = names_of("megatron_core.activations")
