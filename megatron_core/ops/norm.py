"""RMSNorm and LayerNorm over the last dim, also of a sum with the residual; native kernels as torch operators."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_core.ops import native
from megatron_core.ops.backend import Backend, python_backend, select_backend
from megatron_core.ops.operator import Operator, operator
from megatron_core.ops.rows import check, count, in_rows, new_like, new_statistics, partials


def rms_norm(x: Tensor, weight: Tensor, epsilon: float = 1e-5, *, backend: Backend = "auto") -> Tensor:
    """y = x / sqrt(mean(x^2) + epsilon) * weight; ``x`` ``[..., n]``, ``weight`` ``[n]`` (Zhang and Sennrich 2019)."""
    chosen = select_backend("rms_norm", backend, x.device.type, x.dtype)
    if chosen == "native":
        return _rms_norm(x, weight, epsilon)[0]
    check("rms_norm", x, {}, weight=weight)
    return python_backend(chosen).rms_norm(x, weight, epsilon)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, epsilon: float = 1e-5, *, backend: Backend = "auto"
) -> tuple[Tensor, Tensor]:
    """sum = x + residual -> (rms_norm(sum), sum) in one pass; ``x`` and ``residual`` ``[..., n]``."""
    chosen = select_backend("rms_norm", backend, x.device.type, x.dtype)
    if chosen == "native":
        return _add_rms_norm(x, residual, weight, epsilon)[:2]
    check("rms_norm", x, {"residual": residual}, weight=weight)
    total = x + residual
    return python_backend(chosen).rms_norm(total, weight, epsilon), total


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float = 1e-5, *, backend: Backend = "auto") -> Tensor:
    """y = (x - mean) / sqrt(variance + epsilon) * weight + bias; ``x`` ``[..., n]``, the others ``[n]`` (Ba et al.
    2016)."""
    chosen = select_backend("layer_norm", backend, x.device.type, x.dtype)
    if chosen == "native":
        return _layer_norm(x, weight, bias, epsilon)[0]
    check("layer_norm", x, {}, weight=weight, bias=bias)
    return python_backend(chosen).layer_norm(x, weight, bias, epsilon)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, epsilon: float = 1e-5, *, backend: Backend = "auto"
) -> tuple[Tensor, Tensor]:
    """sum = x + residual -> (layer_norm(sum), sum) in one pass; ``x`` and ``residual`` ``[..., n]``."""
    chosen = select_backend("layer_norm", backend, x.device.type, x.dtype)
    if chosen == "native":
        return _add_layer_norm(x, residual, weight, bias, epsilon)[:2]
    check("layer_norm", x, {"residual": residual}, weight=weight, bias=bias)
    total = x + residual
    return python_backend(chosen).layer_norm(total, weight, bias, epsilon), total


@operator("rms_norm")
def _rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    y, _, statistics = _forward(x, None, weight, None, epsilon)
    return y, statistics


@operator("add_rms_norm")
def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    return _forward(x, residual, weight, None, epsilon)


@operator("layer_norm")
def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    y, _, statistics = _forward(x, None, weight, bias, epsilon)
    return y, statistics


@operator("add_layer_norm")
def _add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    return _forward(x, residual, weight, bias, epsilon)


def _forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """-> (y, sum, statistics), the sum being ``x`` if there is no residual; RMSNorm if there is no bias."""
    name, parameters = ("rms_norm", {}) if bias is None else ("layer_norm", {"bias": bias})
    check(name, x, {"residual": residual}, weight=weight, **parameters)
    y, statistics = new_like(x), _new_statistics(x, bias is not None)
    total = None if residual is None else torch.empty_like(y)
    native.call(
        name,
        x,
        *(count(x), x.shape[-1], *in_rows(x), *in_rows(residual), weight.contiguous()),
        *(() if bias is None else (bias.contiguous(),)),
        *(epsilon, y, total, statistics),
    )
    return y, x if total is None else total, statistics


def _new_statistics(x: Tensor, centered: bool) -> Tensor:
    """Memory for [mean, rstd] of each row, or for RMSNorm's rstd."""
    return new_statistics(x, 2) if centered else new_statistics(x)


@operator("rms_norm_backward")
def _rms_norm_backward(
    dy: Tensor, dsum: Tensor | None, x: Tensor, weight: Tensor, statistics: Tensor
) -> tuple[Tensor, Tensor]:
    dx, dweight = _backward("rms_norm_backward", dy, dsum, x, weight, statistics, sums=1)
    return dx, dweight


@operator("layer_norm_backward")
def _layer_norm_backward(
    dy: Tensor, dsum: Tensor | None, x: Tensor, weight: Tensor, statistics: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    dx, dweight, dbias = _backward("layer_norm_backward", dy, dsum, x, weight, statistics, sums=2)
    return dx, dweight, dbias


def _backward(
    name: str, dy: Tensor, dsum: Tensor | None, x: Tensor, weight: Tensor, statistics: Tensor, *, sums: int
) -> list[Tensor]:
    """-> dx and the gradients of as many parameters as there are ``sums`` over rows."""
    check(name, x, {"dy": dy, "dsum": dsum}, weight=weight)
    gradients = [new_like(x), *(torch.empty_like(weight) for _ in range(sums))]
    partial = partials(x, sums)
    native.call(
        name,
        x,
        *(count(x), x.shape[-1], *in_rows(dy), *in_rows(dsum), *in_rows(x)),
        weight.contiguous(),
        statistics,
        *gradients,
        partial,
        len(partial),
    )
    return gradients


def _register(norm: Operator, added: Operator, backward_operator: Operator, sums: int) -> None:
    """Give the operators of one norm their fake and autograd rules."""

    def save(ctx: Any, inputs: tuple, output: tuple) -> None:
        ctx.set_materialize_grads(False)
        (normalized, weight), statistics = inputs[:2], output[1]
        ctx.mark_non_differentiable(statistics)
        ctx.save_for_backward(normalized, weight, statistics)

    def save_sum(ctx: Any, inputs: tuple, output: tuple) -> None:
        save(ctx, (output[1], inputs[2]), (output[0], output[2]))

    def backward(ctx: Any, dy: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return (None,) * (sums + 2)
        return *backward_operator(dy, None, *ctx.saved_tensors), None

    def add_backward(ctx: Any, dy: Tensor | None, dsum: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return dsum, dsum, *[None] * (sums + 1)
        dx, *gradients = backward_operator(dy, dsum, *ctx.saved_tensors)
        return dx, dx, *gradients, None

    def fake_backward(dy: Tensor, dsum: Tensor | None, x: Tensor, weight: Tensor, statistics: Tensor) -> tuple:
        return new_like(x), *(torch.empty_like(weight) for _ in range(sums))

    norm.register_fake(lambda x, *_: (new_like(x), _new_statistics(x, sums == 2)))
    added.register_fake(lambda x, *_: (new_like(x), new_like(x), _new_statistics(x, sums == 2)))
    backward_operator.register_fake(fake_backward)
    norm.register_autograd(backward, save)
    added.register_autograd(add_backward, save_sum)
    backward_operator.register_no_autograd()


_register(_rms_norm, _add_rms_norm, _rms_norm_backward, sums=1)
_register(_layer_norm, _add_layer_norm, _layer_norm_backward, sums=2)
