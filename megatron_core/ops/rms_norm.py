"""RMSNorm over the last dim, also of a sum with the residual; native bodies as torch operators."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_core.ops import native
from megatron_core.ops.backend import Backend, plain, serving
from megatron_core.ops.operator import operator
from megatron_core.ops.rows import check, count, in_rows, new_like, new_statistics, partials


def rms_norm(x: Tensor, weight: Tensor, epsilon: float = 1e-5, *, backend: Backend = "auto") -> Tensor:
    """y = x / sqrt(mean(x^2) + epsilon) * weight; ``x`` ``[..., n]``, ``weight`` ``[n]`` (Zhang and Sennrich 2019)."""
    body = serving("rms_norm", backend, x.device.type, x.dtype)
    if body != "native":
        check("rms_norm", x, {}, weight=weight)
        return plain(body).rms_norm(x, weight, epsilon)
    return _rms_norm(x, weight, epsilon)[0]


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, epsilon: float = 1e-5, *, backend: Backend = "auto"
) -> tuple[Tensor, Tensor]:
    """sum = x + residual -> (rms_norm(sum), sum) in one pass; ``x`` and ``residual`` ``[..., n]``."""
    body = serving("rms_norm", backend, x.device.type, x.dtype)
    if body != "native":
        check("rms_norm", x, {"residual": residual}, weight=weight)
        total = x + residual
        return plain(body).rms_norm(total, weight, epsilon), total
    return _add_rms_norm(x, residual, weight, epsilon)[:2]


@operator("rms_norm")
def _rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    y, _, rstd = _forward(x, None, weight, epsilon)
    return y, rstd


@operator("add_rms_norm")
def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    return _forward(x, residual, weight, epsilon)


@operator("rms_norm_backward")
def _rms_norm_backward(
    dy: Tensor, dsum: Tensor | None, x: Tensor, weight: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    check("rms_norm_backward", x, {"dy": dy, "dsum": dsum}, weight=weight)
    dx, dweight, partial = new_like(x), torch.empty_like(weight), partials(x, 1)
    native.call(
        "rms_norm_backward",
        x,
        *(count(x), x.shape[-1], *in_rows(dy), *in_rows(dsum), *in_rows(x)),
        *(weight.contiguous(), rstd, dx, dweight, partial, len(partial)),
    )
    return dx, dweight


def _forward(x: Tensor, residual: Tensor | None, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    """-> (y, sum, rstd), the sum being ``x`` where there is no residual."""
    check("rms_norm", x, {"residual": residual}, weight=weight)
    y, rstd = new_like(x), new_statistics(x)
    total = None if residual is None else torch.empty_like(y)
    native.call(
        "rms_norm",
        x,
        *(count(x), x.shape[-1], *in_rows(x), *in_rows(residual)),
        *(weight.contiguous(), epsilon, y, total, rstd),
    )
    return y, x if total is None else total, rstd


@_rms_norm.register_fake
def _(x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    return new_like(x), new_statistics(x)


@_add_rms_norm.register_fake
def _(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    return new_like(x), new_like(x), new_statistics(x)


@_rms_norm_backward.register_fake
def _(dy: Tensor, dsum: Tensor | None, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    return new_like(x), torch.empty_like(weight)


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    x, weight, _ = inputs
    _, rstd = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(rstd)
    ctx.save_for_backward(x, weight, rstd)


def _save_sum(ctx: Any, inputs: tuple, output: tuple) -> None:
    _, _, weight, _ = inputs
    _, total, rstd = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(rstd)
    ctx.save_for_backward(total, weight, rstd)


def _backward(ctx: Any, dy: Tensor | None, drstd: None) -> tuple[Tensor | None, ...]:
    if dy is None:
        return (None,) * 3
    return *_rms_norm_backward(dy, None, *ctx.saved_tensors), None


def _add_backward(ctx: Any, dy: Tensor | None, dsum: Tensor | None, drstd: None) -> tuple[Tensor | None, ...]:
    if dy is None:
        return dsum, dsum, *[None] * 2
    dx, dweight = _rms_norm_backward(dy, dsum, *ctx.saved_tensors)
    return dx, dx, dweight, None


_rms_norm.register_autograd(_backward, _save)
_add_rms_norm.register_autograd(_add_backward, _save_sum)
_rms_norm_backward.refuse_gradients()
