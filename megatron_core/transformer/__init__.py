"""The transformer's layers, split over tensor-parallel ranks; they know nothing of pipelines or training."""

from megatron_core.transformer.attention import SelfAttention
from megatron_core.transformer.block import TransformerBlock
from megatron_core.transformer.context import LayerContext, SequenceContext
from megatron_core.transformer.layer import TransformerLayer
from megatron_core.transformer.layer_spec import LayerSpec, layer_spec
from megatron_core.transformer.mlp import MLP
from megatron_core.transformer.norm import Norm

__all__ = [
    "MLP",
    "LayerContext",
    "LayerSpec",
    "Norm",
    "SelfAttention",
    "SequenceContext",
    "TransformerBlock",
    "TransformerLayer",
    "layer_spec",
]
