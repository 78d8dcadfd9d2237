"""LayerNorm over the last dim, also of a sum with the residual; native bodies as torch operators."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_core.ops import native
from megatron_core.ops.backend import Backend, plain, serving
from megatron_core.ops.operator import operator
from megatron_core.ops.rows import check, count, in_rows, new_like, new_statistics, partials


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float = 1e-5, *, backend: Backend = "auto") -> Tensor:
    """y = (x - mean) / sqrt(variance + epsilon) * weight + bias; ``x`` ``[..., n]``, the others ``[n]`` (Ba et al.
    2016)."""
    body = serving("layer_norm", backend, x.device.type, x.dtype)
    if body != "native":
        check("layer_norm", x, {}, weight=weight, bias=bias)
        return plain(body).layer_norm(x, weight, bias, epsilon)
    return _layer_norm(x, weight, bias, epsilon)[0]


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, epsilon: float = 1e-5, *, backend: Backend = "auto"
) -> tuple[Tensor, Tensor]:
    """sum = x + residual -> (layer_norm(sum), sum) in one pass; ``x`` and ``residual`` ``[..., n]``."""
    body = serving("layer_norm", backend, x.device.type, x.dtype)
    if body != "native":
        check("layer_norm", x, {"residual": residual}, weight=weight, bias=bias)
        total = x + residual
        return plain(body).layer_norm(total, weight, bias, epsilon), total
    return _add_layer_norm(x, residual, weight, bias, epsilon)[:2]


@operator("layer_norm")
def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    y, _, statistics = _forward(x, None, weight, bias, epsilon)
    return y, statistics


@operator("add_layer_norm")
def _add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    return _forward(x, residual, weight, bias, epsilon)


@operator("layer_norm_backward")
def _layer_norm_backward(
    dy: Tensor, dsum: Tensor | None, x: Tensor, weight: Tensor, statistics: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    check("layer_norm_backward", x, {"dy": dy, "dsum": dsum}, weight=weight)
    dx, dweight, dbias = new_like(x), torch.empty_like(weight), torch.empty_like(weight)
    partial = partials(x, 2)
    native.call(
        "layer_norm_backward",
        x,
        *(count(x), x.shape[-1], *in_rows(dy), *in_rows(dsum), *in_rows(x)),
        *(weight.contiguous(), statistics, dx, dweight, dbias, partial, len(partial)),
    )
    return dx, dweight, dbias


def _forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """-> (y, sum, [mean, rstd]), the sum being ``x`` where there is no residual."""
    check("layer_norm", x, {"residual": residual}, weight=weight, bias=bias)
    y, statistics = new_like(x), new_statistics(x, 2)
    total = None if residual is None else torch.empty_like(y)
    native.call(
        "layer_norm",
        x,
        *(count(x), x.shape[-1], *in_rows(x), *in_rows(residual)),
        *(weight.contiguous(), bias.contiguous(), epsilon, y, total, statistics),
    )
    return y, x if total is None else total, statistics


@_layer_norm.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    return new_like(x), new_statistics(x, 2)


@_add_layer_norm.register_fake
def _(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    return new_like(x), new_like(x), new_statistics(x, 2)


@_layer_norm_backward.register_fake
def _(dy: Tensor, dsum: Tensor | None, x: Tensor, weight: Tensor, statistics: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return new_like(x), torch.empty_like(weight), torch.empty_like(weight)


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    x, weight, _, _ = inputs
    _, statistics = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(statistics)
    ctx.save_for_backward(x, weight, statistics)


def _save_sum(ctx: Any, inputs: tuple, output: tuple) -> None:
    _, _, weight, _, _ = inputs
    _, total, statistics = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(statistics)
    ctx.save_for_backward(total, weight, statistics)


def _backward(ctx: Any, dy: Tensor | None, dstatistics: None) -> tuple[Tensor | None, ...]:
    if dy is None:
        return (None,) * 4
    return *_layer_norm_backward(dy, None, *ctx.saved_tensors), None


def _add_backward(ctx: Any, dy: Tensor | None, dsum: Tensor | None, dstatistics: None) -> tuple[Tensor | None, ...]:
    if dy is None:
        return dsum, dsum, *[None] * 3
    dx, dweight, dbias = _layer_norm_backward(dy, dsum, *ctx.saved_tensors)
    return dx, dx, dweight, dbias, None


_layer_norm.register_autograd(_backward, _save)
_add_layer_norm.register_autograd(_add_backward, _save_sum)
_layer_norm_backward.refuse_gradients()
