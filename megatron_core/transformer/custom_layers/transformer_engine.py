"""For Megatron Core's users: ``megatron_core.extensions.transformer_engine`` under its former path."""

from megatron_core.lazy import names_of

__getattr__ = names_of("megatron_core.extensions.transformer_engine")
