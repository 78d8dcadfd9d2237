"""Transformer layers with Megatron Core's names."""

from megatron.core.transformer.layer_context import TransformerBlockSubmodules, TransformerLayerSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
