"""Rotary position embedding: rotate pairs of channels by an angle per position; native kernels as a torch operator."""

from typing import Any

from torch import Tensor

from megatron_core.errors import ConfigError
from megatron_core.ops import native, reference
from megatron_core.ops.backend import Backend, select_backend
from megatron_core.ops.operator import operator
from megatron_core.ops.rows import contiguous_last_dim, new_like, wide


def rope(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, backend: Backend = "auto") -> Tensor:
    """Pairs (a, b) of channels -> (a cos - b sin, b cos + a sin); column i of the tables is the angle of pair i.

    ``x`` is ``[s, b, ..., d]``, where ``...`` are zero, one or two dims of heads; ``cos`` and ``sin`` are
    ``[s, b or 1, r/2]``, or ``[s, r/2]`` for ``x`` ``[s, ..., d]``. The first r channels are rotated. Pair i are
    channels i and i + r/2, or with ``interleaved`` 2i and 2i + 1. The tables are float32 (float64 for float64), without
    a gradient. Source: Su et al. 2021, section 3.4.2.
    """
    # bfloat16 tables would have errors of up to 0.004 in the angles and would change the lengths of pairs; wide ones
    # are small compared to ``x``, because all heads use the same row. ``x`` may have any strides: it is usually a view
    # of a fused projection, and a copy would double the traffic of this operation.
    chosen = select_backend("rope", backend, x.device.type, x.dtype)
    if chosen != "native":
        _check(x, cos, sin)
        return reference.rope(x, cos, sin, interleaved)
    return _rope(x, cos, sin, interleaved, False)


def _check(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    # Plain tests instead of loops: this runs for every layer, forward and backward.
    extents = x.shape
    table = cos.shape
    if len(table) not in (2, 3) or not 0 <= len(extents) - len(table) <= 2:
        raise ConfigError(f"rope: {_shapes(x, cos, sin)}; x must be [s, b, heads, d] and the tables [s, b or 1, r/2]")
    fits = table[0] in (1, extents[0]) and (len(table) == 2 or table[1] in (1, extents[1]))
    if table != sin.shape or not fits or not 2 <= 2 * table[-1] <= extents[-1]:
        raise ConfigError(
            f"rope: {_shapes(x, cos, sin)}; the tables must have the same shape, the first dims of x (or 1), and one "
            "column per rotated pair of channels"
        )
    dtype = wide(x.dtype)
    for name, tensor in (("cos", cos), ("sin", sin)):
        if tensor.dtype != dtype or tensor.device != x.device:
            raise ConfigError(
                f"rope: {name} is {tensor.dtype} on {tensor.device}; for x, which is {x.dtype} on {x.device}, it must "
                f"be {dtype} on {x.device}"
            )


def _shapes(x: Tensor, cos: Tensor, sin: Tensor) -> str:
    return f"x is {list(x.shape)}, cos {list(cos.shape)} and sin {list(sin.shape)}"


@operator("rope")
def _rope(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool) -> Tensor:
    _check(x, cos, sin)
    # The kernel takes up to two dims of heads with strides of their own: query heads of a fused projection are grouped.
    y = new_like(x)
    x = contiguous_last_dim(x)
    sizes, strides = _five_dims(x, cos.dim() - 1)
    cos = cos.contiguous()
    sin = sin.contiguous()
    numbers: list[native.Value] = [*sizes, 2 * cos.shape[-1], x, *strides[:-1], cos, sin, *_table_strides(cos)]
    native.call("rope", x, *numbers, interleaved, inverse, y)
    return y


def _five_dims(x: Tensor, positions: int) -> tuple[list[int], list[int]]:
    """Sizes and strides of ``x`` as ``[s, b, groups, heads, d]``, with size 1 for missing dims."""
    # Numbers instead of views, each of which takes as long as a small kernel.
    sizes = [1] * (2 - positions) + list(x.shape)
    strides = [0] * (2 - positions) + list(x.stride())
    missing = 5 - len(sizes)
    sizes[2:2] = [1] * missing
    strides[2:2] = [0] * missing
    return sizes, strides


def _table_strides(table: Tensor) -> tuple[int, int]:
    """Strides of ``s`` and ``b`` in ``[s, b, r/2]``; 0 for a dim of size 1, which broadcasts."""
    sizes = table.shape
    strides = table.stride()
    length = 0 if len(sizes) == 2 or sizes[0] == 1 else strides[0]
    batch = 0 if sizes[-2] == 1 else strides[-2]
    return length, batch


def _save(ctx: Any, inputs: tuple, output: Tensor) -> None:
    _, cos, sin, ctx.interleaved, ctx.inverse = inputs
    if any(ctx.needs_input_grad[1:3]):
        raise NotImplementedError("rope gives its tables no gradient; backend='reference' does")
    ctx.save_for_backward(cos, sin)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    """The inverse rotation, which is also linear: higher derivatives are one of the two rotations."""
    return _rope(dy, *ctx.saved_tensors, ctx.interleaved, not ctx.inverse), *[None] * 4


_rope.register_fake(lambda x, *_: new_like(x))
_rope.register_autograd(_backward, _save)
