"""Attention with Megatron's arguments."""

from megatron.core.inference.contexts.base_context import BaseInferenceContext
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.layer_context import SelfAttentionSubmodules
from megatron.core.transformer.layer_parts import SelfAttention
from megatron.core.utils import deprecate_inference_params, is_fa_min_version, nvtx_range_pop, nvtx_range_push
from megatron_core.drop_in.unsupported import Unsupported
from megatron_core.transformer.attention import CoreAttention

Attention = SelfAttention


class CrossAttention(Unsupported):
    """Stands for Megatron's class; building it raises ConfigError."""

    message = "CrossAttention is not supported: there are no encoders; use SelfAttention"
