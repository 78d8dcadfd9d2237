"""Causal attention of training on a CPU, in blocks of scores that stay in the cache; a native kernel as an operator."""

import math
from ctypes import Array, c_int64
from typing import Any

import torch
from torch import Tensor

from megatron_core.ops import native
from megatron_core.ops.backend import Backend, select_backend
from megatron_core.ops.operator import operator

LANES = 8
"""The number of channels of a head is a multiple of this in the native kernel."""


def has_native_attention(query: Tensor, key: Tensor, value: Tensor, backend: Backend) -> bool:
    """Whether ``causal_attention`` has a kernel for these: float32 on a CPU, with equal lengths and widths."""
    # The kernel is written for training, where queries and keys are the same tokens.
    same = query.shape[0] == key.shape[0] and query.shape[-1] == key.shape[-1] == value.shape[-1]
    if not (query.is_cpu and query.dtype == torch.float32 and same and query.shape[-1] % LANES == 0 and len(query)):
        return False
    return select_backend("attention", backend, "cpu", query.dtype) == "native"


def causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """softmax(q K^T / sqrt(d)) V over the keys up to each query's position: ``query`` ``[s, b, heads, d]``, ``key`` and
    ``value`` ``[s, b, groups, d]`` with any strides of the first three dims -> ``[s, b, heads * d]``.

    Requires ``has_native_attention``. Backward computes the weights again from each row's maximum and sum.
    Source: Dao et al. 2022, algorithms 1 and 4; Ainslie et al. 2023 for groups.
    """
    return _causal_attention(query, key, value)[0]


@operator("causal_attention")
def _causal_attention(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """-> (output, maximum of the scores and 1 / sum of exponentials ``[b, heads, 2, s]``)."""
    # Queries, keys and values are views of one projection: the kernel takes their strides, so that only channels must
    # be contiguous.
    inputs = [_with_contiguous_channels(tensor) for tensor in (query, key, value)]
    out = _like_output(query)
    statistics = _statistics_of(query)
    numbers = _numbers(key, *inputs, out.view(query.shape))
    native.call("causal_attention", query, *numbers, *inputs, _scale(query), out, statistics)
    return out, statistics


@operator("causal_attention_backward")
def _causal_attention_backward(
    dout: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, statistics: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """-> gradients of query, key and value, all contiguous."""
    inputs = [_with_contiguous_channels(tensor) for tensor in (query, key, value, out.view(query.shape))]
    inputs.append(_with_contiguous_channels(dout.view(query.shape)))
    gradients = _gradients(query, key, value)
    numbers = _numbers(key, *inputs, *gradients)
    scale = _scale(query)
    native.call("causal_attention_backward", query, *numbers, *inputs, statistics, scale, *gradients)
    return gradients


def _numbers(key: Tensor, query: Tensor, *tensors: Tensor) -> tuple[Array, Array]:
    """Shape and strides as the kernel reads them: 64-bit integers in memory."""
    length, batch, heads, channels = query.shape
    strides = [stride for tensor in (query, *tensors) for stride in tensor.stride()[:3]]
    # In memory instead of 17 arguments: the numbers of tensors differ between forward and backward.
    return (c_int64 * 5)(batch, heads, key.shape[2], length, channels), (c_int64 * len(strides))(*strides)


def _scale(query: Tensor) -> float:
    return 1.0 / math.sqrt(query.shape[-1])


def _with_contiguous_channels(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _like_output(query: Tensor) -> Tensor:
    return query.new_empty((*query.shape[:2], query.shape[2] * query.shape[3]))


def _statistics_of(query: Tensor) -> Tensor:
    return query.new_empty((query.shape[1], query.shape[2], 2, query.shape[0]))


def _gradients(*inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = (tensor.new_empty(tensor.shape) for tensor in inputs)
    return query, key, value


def _save(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    # Otherwise autograd allocates zeros as the gradient of the statistics.
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*inputs, *output)


def _backward(ctx: Any, dout: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    return (None,) * 3 if dout is None else _causal_attention_backward(dout, *ctx.saved_tensors)


_causal_attention.register_fake(lambda query, *_: (_like_output(query), _statistics_of(query)))
_causal_attention.register_autograd(_backward, _save)
_causal_attention_backward.register_fake(lambda dout, *arguments: _gradients(*arguments[:3]))
_causal_attention_backward.register_no_autograd()
