"""The transformer's layers, split over tensor-parallel ranks; they know nothing of pipelines or training.

Names for Megatron Core's users are imported when they are first used.
"""

from typing import TYPE_CHECKING

from megatron_core.lazy import lazy_names
from megatron_core.transformer.attention import SelfAttention
from megatron_core.transformer.block import TransformerBlock
from megatron_core.transformer.context import LayerContext, SequenceContext
from megatron_core.transformer.layer import TransformerLayer
from megatron_core.transformer.layer_spec import LayerSpec, layer_spec
from megatron_core.transformer.mlp import MLP
from megatron_core.transformer.norm import Norm

if TYPE_CHECKING:
    from megatron_core.transformer.layer_context import TransformerBlockSubmodules, TransformerLayerSubmodules
    from megatron_core.transformer.module import MegatronModule
    from megatron_core.transformer.spec_utils import ModuleSpec, build_module
    from megatron_core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

__getattr__ = lazy_names(__name__, __file__)
