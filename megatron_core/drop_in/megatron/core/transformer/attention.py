"""Attention with Megatron's arguments."""

from megatron.core.transformer.layer_context import SelfAttentionSubmodules
from megatron.core.transformer.layer_parts import SelfAttention
from megatron_core.transformer.attention import CoreAttention
