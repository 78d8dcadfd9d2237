"""Transformer layers, sharded over tensor-parallel ranks. They do not depend on pipelines or training.

``__init__.pyi`` lists all names.
"""

from typing import TYPE_CHECKING

import lazy_loader

from megatron_core.transformer.attention import SelfAttention
from megatron_core.transformer.block import TransformerBlock, TransformerLayer
from megatron_core.transformer.context import LayerContext, SequenceContext
from megatron_core.transformer.layer_spec import LayerSpec, layer_spec, register_attention
from megatron_core.transformer.mlp import MLP
from megatron_core.transformer.norm import Norm

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

if not TYPE_CHECKING:
    from megatron_core.moved import old_names_of

    __getattr__ = old_names_of(__name__, __getattr__)
