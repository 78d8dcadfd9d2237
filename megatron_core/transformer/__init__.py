"""Transformer layers, sharded over tensor-parallel ranks. They do not depend on pipelines or training."""

from megatron_core.transformer.attention import SelfAttention
from megatron_core.transformer.block import TransformerBlock, TransformerLayer
from megatron_core.transformer.context import LayerContext, SequenceContext
from megatron_core.transformer.layer_spec import LayerSpec, layer_spec, register_attention
from megatron_core.transformer.mlp import MLP
from megatron_core.transformer.norm import Norm
