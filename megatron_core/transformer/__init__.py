"""The transformer's layers, split over tensor-parallel ranks; they know nothing of pipelines or training."""

from megatron_core.transformer.attention import SelfAttention
from megatron_core.transformer.block import TransformerBlock, TransformerLayer
from megatron_core.transformer.context import SequenceContext
from megatron_core.transformer.mlp import MLP
from megatron_core.transformer.norm import Norm

__all__ = ["MLP", "Norm", "SelfAttention", "SequenceContext", "TransformerBlock", "TransformerLayer"]
