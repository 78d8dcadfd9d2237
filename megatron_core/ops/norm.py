"""RMSNorm and LayerNorm over the last dim; native kernels as torch operators."""

from typing import Any

import torch
from torch import Tensor

from megatron_core.ops import native
from megatron_core.ops.backend import Backend, python_backend, select_backend
from megatron_core.ops.operator import Operator, operator
from megatron_core.ops.rows import check_rows, count, in_rows, new_like, partials, wide


def rms_norm(x: Tensor, weight: Tensor, epsilon: float = 1e-5, *, backend: Backend = "auto") -> Tensor:
    """y = x / sqrt(mean(x^2) + epsilon) * weight; ``x`` ``[..., n]``, ``weight`` ``[n]`` (Zhang and Sennrich 2019)."""
    chosen = select_backend("rms_norm", backend, x.device.type, x.dtype)
    if chosen == "native":
        return _rms_norm(x, weight, epsilon)[0]
    check_rows("rms_norm", x, {}, weight=weight)
    return python_backend(chosen).rms_norm(x, weight, epsilon)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float = 1e-5, *, backend: Backend = "auto") -> Tensor:
    """y = (x - mean) / sqrt(variance + epsilon) * weight + bias; ``x`` ``[..., n]``, the others ``[n]`` (Ba et al.
    2016)."""
    chosen = select_backend("layer_norm", backend, x.device.type, x.dtype)
    if chosen == "native":
        return _layer_norm(x, weight, bias, epsilon)[0]
    check_rows("layer_norm", x, {}, weight=weight, bias=bias)
    return python_backend(chosen).layer_norm(x, weight, bias, epsilon)


@operator("rms_norm")
def _rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """-> (y, rstd of each row)."""
    return _forward("rms_norm", x, epsilon, weight=weight)


@operator("layer_norm")
def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """-> (y, [mean, rstd] of each row)."""
    return _forward("layer_norm", x, epsilon, weight=weight, bias=bias)


def _forward(name: str, x: Tensor, epsilon: float, **parameters: Tensor) -> tuple[Tensor, Tensor]:
    check_rows(name, x, {}, **parameters)
    # Statistics in float32 or wider: backward needs 1 / sqrt(variance), whose rounding to 16 bits would be visible.
    y = new_like(x)
    statistics = _new_statistics(x, len(parameters))
    contiguous = (parameter.contiguous() for parameter in parameters.values())
    native.call(name, x, count(x), x.shape[-1], *in_rows(x), *contiguous, epsilon, y, statistics)
    return y, statistics


def _new_statistics(x: Tensor, parameters: int) -> Tensor:
    return x.new_empty((*(2,) * (parameters - 1), *x.shape[:-1]), dtype=wide(x.dtype))


@operator("rms_norm_backward")
def _rms_norm_backward(dy: Tensor, x: Tensor, weight: Tensor, statistics: Tensor) -> tuple[Tensor, Tensor]:
    dx, dweight = _backward("rms_norm_backward", dy, x, weight, statistics, sums=1)
    return dx, dweight


@operator("layer_norm_backward")
def _layer_norm_backward(dy: Tensor, x: Tensor, weight: Tensor, statistics: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dx, dweight, dbias = _backward("layer_norm_backward", dy, x, weight, statistics, sums=2)
    return dx, dweight, dbias


def _backward(name: str, dy: Tensor, x: Tensor, weight: Tensor, statistics: Tensor, *, sums: int) -> list[Tensor]:
    """-> dx and the gradients of ``sums`` parameters, each of which is a sum over rows."""
    # Without checks: autograd gives ``dy`` the shape and dtype of the output, which forward has checked.
    gradients = _gradients(x, weight, sums)
    partial = partials(x, sums)
    rows = (count(x), x.shape[-1], *in_rows(dy), *in_rows(x))
    native.call(name, x, *rows, weight.contiguous(), statistics, *gradients, partial, len(partial))
    return gradients


def _gradients(x: Tensor, weight: Tensor, sums: int) -> list[Tensor]:
    return [new_like(x), *(torch.empty_like(weight) for _ in range(sums))]


def _register(norm: Operator, backward_operator: Operator, sums: int) -> None:
    """Register the fake and autograd rules of one norm."""

    def save(ctx: Any, inputs: tuple, output: tuple) -> None:
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*inputs[:2], output[1])

    def backward(ctx: Any, dy: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return (None,) * (sums + 2)
        return *backward_operator(dy, *ctx.saved_tensors), None

    norm.register_fake(lambda x, *_: (new_like(x), _new_statistics(x, sums)))
    norm.register_autograd(backward, save)
    backward_operator.register_fake(lambda dy, x, weight, _: tuple(_gradients(x, weight, sums)))
    backward_operator.register_no_autograd()


_register(_rms_norm, _rms_norm_backward, sums=1)
_register(_layer_norm, _layer_norm_backward, sums=2)
