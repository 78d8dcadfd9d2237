"""``megatron_core.transformer.mlp`` at Megatron's path; ``MLP`` takes Megatron's arguments."""

from megatron.core.transformer.layer_parts import MLP
from megatron_core.transformer.mlp import MLPSubmodules
