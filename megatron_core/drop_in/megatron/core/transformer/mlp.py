"""``MLP`` with Megatron's arguments."""

from megatron.core.transformer.layer_context import MLPSubmodules
from megatron.core.transformer.layer_parts import MLP
