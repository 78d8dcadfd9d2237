"""The reference implementation of every operation in PyTorch, in any precision."""

from megatron_core.ops.reference.dropout import bias_dropout_add
from megatron_core.ops.reference.operations import (
    adamw_,
    attention_softmax,
    bias_activation,
    cross_entropy_backward,
    cross_entropy_parts,
    layer_norm,
    rms_norm,
    rope,
    scale_,
    squared_norm,
)

__all__ = [
    "adamw_",
    "attention_softmax",
    "bias_activation",
    "bias_dropout_add",
    "cross_entropy_backward",
    "cross_entropy_parts",
    "layer_norm",
    "rms_norm",
    "rope",
    "scale_",
    "squared_norm",
]
