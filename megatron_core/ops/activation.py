"""Activation functions of the feed-forward layer, fused with the bias; native kernels as torch operators."""

from typing import Any, Literal

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_core.errors import ConfigError
from megatron_core.ops import native, reference
from megatron_core.ops.backend import Backend, python_backend, select_backend_for
from megatron_core.ops.operator import operator
from megatron_core.ops.rows import check, count, in_rows, new_like, partials

Kind = Literal["gelu", "gelu_tanh", "squared_relu", "relu", "swiglu", "geglu", "geglu_tanh", "quick_geglu"]

NUMBERS = {"gelu": 0, "gelu_tanh": 1, "squared_relu": 2, "swiglu": 3, "geglu": 4, "geglu_tanh": 5}
"""Numbers of the activation functions in csrc/common/activation.h."""

GATED = frozenset(reference.GATES)
"""Gated activations: f(gate) * value."""
LEGAL = (*NUMBERS, *(kind for kind in (*reference.FUNCTIONS, *reference.GATES) if kind not in NUMBERS))


def bias_activation(
    x: Tensor,
    bias: Tensor | None,
    kind: Kind,
    *,
    limit: float | None = None,
    offset: float = 0.0,
    backend: Backend = "auto",
) -> Tensor:
    """y = f(x + bias); ``x`` ``[..., n]``, ``bias`` ``[n]`` or None -> ``[..., n]``; gated: n = 2 m, the first half is
    the gate and the second half the value, -> ``[..., m]``. Only ``x`` and ``bias`` are saved for backward.

    gelu: x Phi(x) or its tanh form (Hendrycks and Gimpel 2016); squared_relu (So et al. 2021); swiglu, geglu: silu or
    gelu of the gate, times the value (Shazeer 2020); quick_geglu: x sigmoid(1.702 x) of the gate. ``limit`` bounds gate
    and value, and ``offset`` is added to the value (``reference.gated``). relu, quick_geglu, ``limit`` and ``offset``
    have no kernel on any backend: backward computes the reference again.
    """
    if kind not in NUMBERS or limit is not None or offset:
        _check("bias_activation", x, bias, kind)
        again: Tensor = checkpoint(
            reference.bias_activation, x, bias, kind, limit, offset, use_reentrant=False, preserve_rng_state=False
        )
        return again
    chosen = select_backend_for("activation", backend, x, x, kind)
    if chosen != "native":
        _check("bias_activation", x, bias, kind)
        return python_backend(chosen).bias_activation(x, bias, kind)
    return _bias_activation(x, bias, kind)


def xielu(x: Tensor, bias: Tensor | None, alpha_p: Tensor, alpha_n: Tensor) -> Tensor:
    """``reference.xielu``; backward computes it again, so that only its arguments are saved."""
    again: Tensor = checkpoint(
        reference.xielu, x, bias, alpha_p, alpha_n, use_reentrant=False, preserve_rng_state=False
    )
    return again


@operator("bias_activation")
def _bias_activation(x: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    _check("bias_activation", x, bias, kind)
    y = _like_output(x, kind)
    native.call("bias_activation", x, NUMBERS[kind], count(x), y.shape[-1], *in_rows(x), _contiguous(bias), y)
    return y


@operator("bias_activation_backward")
def _bias_activation_backward(dy: Tensor, x: Tensor, bias: Tensor | None, kind: str) -> tuple[Tensor, Tensor]:
    """-> (dx, dbias); dbias is empty if there is no bias."""
    _check("bias_activation_backward", x, bias, kind)
    columns = _columns(x, kind)
    check("bias_activation_backward", x[..., :columns], {"dy": dy})
    dx, dbias = new_like(x), _like_bias(x, bias)
    partial = None if bias is None else partials(x, 1)
    native.call(
        "bias_activation_backward",
        x,
        *(NUMBERS[kind], count(x), columns, *in_rows(dy), *in_rows(x)),
        *(_contiguous(bias), dx, None if bias is None else dbias, partial, 0 if partial is None else len(partial)),
    )
    return dx, dbias


def _save(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, bias, ctx.kind = inputs
    ctx.save_for_backward(x, bias)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, bias = ctx.saved_tensors
    dx, dbias = _bias_activation_backward(dy, x, bias, ctx.kind)
    return dx, None if bias is None else dbias, None


_bias_activation.register_fake(lambda x, bias, kind: _like_output(x, kind))
_bias_activation_backward.register_fake(lambda dy, x, bias, kind: (new_like(x), _like_bias(x, bias)))
_bias_activation.register_autograd(_backward, _save)
_bias_activation_backward.register_no_autograd()


def _check(op: str, x: Tensor, bias: Tensor | None, kind: str) -> None:
    if kind not in LEGAL:
        raise ConfigError(f"{op}: kind={kind!r}; legal: {', '.join(LEGAL)}")
    check(op, x, {}, **({} if bias is None else {"bias": bias}))
    if kind in GATED and x.shape[-1] % 2:
        raise ConfigError(
            f"{op}: x is {list(x.shape)}; its last dim is the gate and the value of {kind} and must be even"
        )


def _columns(x: Tensor, kind: str) -> int:
    return x.shape[-1] // 2 if kind in GATED else x.shape[-1]


def _like_output(x: Tensor, kind: str) -> Tensor:
    return x.new_empty((*x.shape[:-1], _columns(x, kind)))


def _like_bias(x: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(0 if bias is None else bias.shape)


def _contiguous(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.contiguous()
