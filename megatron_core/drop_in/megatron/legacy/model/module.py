"""The base class of modules, at its former path."""

from megatron.core.transformer.module import Float16Module, MegatronModule
