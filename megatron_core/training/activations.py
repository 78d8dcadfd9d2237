"""For Megatron-LM's users: activation functions under their former path."""

from megatron_core.lazy import lazy_names

__getattr__ = lazy_names("megatron_core", {"activations": ("fast_gelu", "quick_gelu", "squared_relu")})
