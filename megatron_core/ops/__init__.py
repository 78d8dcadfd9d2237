"""Fused operations: the native kernels of csrc as torch operators, and a reference in PyTorch for each."""

from megatron_core.ops.activation import bias_activation
from megatron_core.ops.backend import Backend
from megatron_core.ops.cross_entropy import cross_entropy_backward, cross_entropy_parts
from megatron_core.ops.dropout import bias_dropout_add
from megatron_core.ops.matmul import accumulate_weight_grad_, input_grad, linear, linear_into
from megatron_core.ops.multi_tensor import adamw_, scale_, squared_norm
from megatron_core.ops.norm import layer_norm, rms_norm
from megatron_core.ops.rope import rope
from megatron_core.ops.softmax import attention_softmax
