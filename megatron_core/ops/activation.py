"""Activation functions of the feed-forward layer, fused with the bias; native kernels as torch operators."""

from typing import Any, Literal

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_core.errors import ConfigError
from megatron_core.ops import native, reference
from megatron_core.ops.backend import Backend, python_backend, select_backend_for
from megatron_core.ops.operator import operator
from megatron_core.ops.rows import check_rows, count, in_rows, new_like, partials

Kind = Literal["gelu", "gelu_tanh", "squared_relu", "relu", "swiglu", "geglu", "geglu_tanh", "quick_geglu"]

NUMBERS = {"gelu": 0, "gelu_tanh": 1, "squared_relu": 2, "swiglu": 3, "geglu": 4, "geglu_tanh": 5}
"""Numbers of the activation functions in csrc/common/activation.h."""

GATED = frozenset(reference.GATES)
"""Gated activations: f(gate) * value."""
LEGAL = (
    *NUMBERS,
    *(activation for activation in (*reference.FUNCTIONS, *reference.GATES) if activation not in NUMBERS),
)


def bias_activation(
    x: Tensor,
    bias: Tensor | None,
    activation: Kind,
    *,
    limit: float | None = None,
    offset: float = 0.0,
    backend: Backend = "auto",
) -> Tensor:
    """y = f(x + bias); ``x`` ``[..., n]``, ``bias`` ``[n]`` or None -> ``[..., n]``; gated: n = 2 m, the first half is
    the gate and the second half the value, -> ``[..., m]``.

    Only ``x`` and ``bias`` are saved for backward. ``limit`` bounds gate and value, and ``offset`` is added to the
    value (``reference.gated``). ``reference.FUNCTIONS`` and ``GATES`` define the functions.
    """
    # The bias is added here and not by the product before it: the sum would be one more tensor to write, read and save.
    # relu, quick_geglu, ``limit`` and ``offset`` have no kernel on any backend; recomputing the reference keeps the
    # promise that only the arguments are saved.
    if activation not in NUMBERS or limit is not None or offset:
        _check("bias_activation", x, bias, activation)
        return checkpoint(
            reference.bias_activation, x, bias, activation, limit, offset, use_reentrant=False, preserve_rng_state=False
        )
    chosen = select_backend_for("activation", backend, x, x, activation)
    if chosen != "native":
        _check("bias_activation", x, bias, activation)
        return python_backend(chosen).bias_activation(x, bias, activation)
    return _bias_activation(x, bias, activation)


def xielu(x: Tensor, bias: Tensor | None, alpha_p: Tensor, alpha_n: Tensor) -> Tensor:
    """``reference.xielu``; backward computes it again, so that only its arguments are saved."""
    return checkpoint(reference.xielu, x, bias, alpha_p, alpha_n, use_reentrant=False, preserve_rng_state=False)


@operator("bias_activation")
def _bias_activation(x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    _check("bias_activation", x, bias, activation)
    y = _like_output(x, activation)
    native.call("bias_activation", x, NUMBERS[activation], count(x), y.shape[-1], *in_rows(x), _contiguous(bias), y)
    return y


@operator("bias_activation_backward")
def _bias_activation_backward(dy: Tensor, x: Tensor, bias: Tensor | None, activation: str) -> tuple[Tensor, Tensor]:
    """-> (dx, dbias); dbias is empty if there is no bias."""
    _check("bias_activation_backward", x, bias, activation)
    columns = _columns(x, activation)
    if dy.shape[:-1] != x.shape[:-1] or dy.shape[-1] != columns or dy.dtype != x.dtype or dy.device != x.device:
        check_rows("bias_activation_backward", x[..., :columns], {"dy": dy})
    # An operator must return tensors of fixed number and type, so an absent gradient is an empty tensor.
    dx = new_like(x)
    dbias = _like_bias(x, bias)
    # The gradient of the bias is a sum over rows, which the pass over ``dy`` computes anyway.
    partial = None if bias is None else partials(x, 1)
    native.call(
        "bias_activation_backward",
        x,
        *(NUMBERS[activation], count(x), columns, *in_rows(dy), *in_rows(x)),
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


_bias_activation.register_fake(lambda x, bias, activation: _like_output(x, activation))
_bias_activation_backward.register_fake(lambda dy, x, bias, activation: (new_like(x), _like_bias(x, bias)))
_bias_activation.register_autograd(_backward, _save)
# Second derivatives are left to the reference, whose backward autograd differentiates.
_bias_activation_backward.register_no_autograd()


def _check(op: str, x: Tensor, bias: Tensor | None, activation: str) -> None:
    if activation not in LEGAL:
        raise ConfigError(f"{op}: kind={activation!r}; legal: {', '.join(LEGAL)}")
    check_rows(op, x, {}, **({} if bias is None else {"bias": bias}))
    if activation in GATED and x.shape[-1] % 2:
        raise ConfigError(
            f"{op}: x is {list(x.shape)}; its last dim is the gate and the value of {activation} and must be even"
        )


def _columns(x: Tensor, activation: str) -> int:
    return x.shape[-1] // 2 if activation in GATED else x.shape[-1]


def _like_output(x: Tensor, activation: str) -> Tensor:
    return x.new_empty((*x.shape[:-1], _columns(x, activation)))


def _like_bias(x: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(0 if bias is None else bias.shape)


def _contiguous(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.contiguous()
