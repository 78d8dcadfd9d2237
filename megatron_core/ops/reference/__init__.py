"""What every operation computes, in PyTorch: the specification of the native bodies, good in any precision.

These serve where no native body does, with PyTorch's own backward; so where PyTorch has the function, they are it.
"""

from megatron_core.ops.reference.activation import bias_activation
from megatron_core.ops.reference.cross_entropy import cross_entropy_backward, cross_entropy_parts
from megatron_core.ops.reference.dropout import bias_dropout_add
from megatron_core.ops.reference.multi_tensor import adamw_, scale_, squared_norm
from megatron_core.ops.reference.norm import layer_norm, rms_norm
from megatron_core.ops.reference.rope import rope
from megatron_core.ops.reference.softmax import attention_softmax

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
