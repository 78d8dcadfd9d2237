"""Operations by NVIDIA's Transformer Engine, from version 2.3 on, for comparison on GPUs; never needed.

Loaded only where ``kernel_backend='transformer_engine'`` asks for it. The functions are those that its own modules
call (``transformer_engine/pytorch/ops/basic``, ``attention``, ``optimizers``): of the compiled module, where versions
2.4, 2.8 and 2.20 call them alike, else, as for rope, the one above them. They take less than ours do: ``covers`` and
``fits`` say which calls they serve; ``auto`` serves the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_core.ops.libraries import fused_rope, fused_softmax, tensor_lists
from megatron_core.ops.libraries.fused_softmax import HALVES, Kernel

OPS = ("activation", "layer_norm", "multi_tensor", "rms_norm", "rope", "softmax")
"""The operations that it has an equivalent of."""
DTYPES = {"softmax": HALVES}
"""Where its equivalent is for fewer data types than the others'."""
LIMITED = frozenset({"activation", "multi_tensor", "rope", "softmax"})
"""The operations of which it takes some calls only."""
EXTENSION = "transformer_engine_torch"
"""The compiled module behind them."""
SM_MARGIN, ZERO_CENTERED = 0, False
ACTIVATIONS = {"gelu_tanh": "gelu", "geglu_tanh": "geglu", "squared_relu": "srelu", "swiglu": "swiglu"}
"""Its names of ours: its gelu is the tanh form, and the first half of a gated one is the gate."""
SOFTMAXES = {
    "whole": "scaled_softmax",
    "masked": "scaled_masked_softmax",
    "triangle": "scaled_upper_triang_masked_softmax",
    "aligned": "scaled_aligned_causal_masked_softmax",
}
"""Its names of the forms of ``fused_softmax``."""
MOST_TENSORS = 1024
"""How many its own optimizer passes to one call."""


def why_not(op: str, device_type: str, dtype: torch.dtype) -> str | None:
    """Why Transformer Engine cannot serve an operation that it has for tensors of a kind; None if it can."""
    if _is_absent():
        return f'{EXTENSION} is not installed; pip install "transformer-engine[pytorch]>=2.3"'
    if device_type != "cuda":
        return f"Transformer Engine is for cuda, not {device_type}"
    return None if dtype != torch.float64 else f"Transformer Engine has no {dtype}"


@cache
def _is_absent() -> bool:
    return find_spec(EXTENSION) is None


def covers(op: str, dtype: torch.dtype) -> bool:
    """Whether it has an equivalent of ``op`` for ``dtype``; float64, which it has for none, ``why_not`` refuses."""
    return op in OPS and (dtype == torch.float64 or dtype in DTYPES.get(op, (torch.float32, *HALVES)))


def fits(op: str, *arguments: Any) -> bool:
    """Whether the equivalent of an operation takes a call, of which ``arguments`` are those that decide it."""
    if op == "activation":
        x, kind = arguments
        return kind in ACTIVATIONS and x.numel() > 0
    if op == "softmax":
        scores, *_ = arguments
        form = fused_softmax.form_of(*arguments)
        return form is not None and fused_softmax.fits_warps(scores, form)
    if op == "rope":
        *tensors, _ = arguments
        return fused_rope.fits(*tensors)
    if op == "multi_tensor":
        (tensors,) = arguments
        return len(tensors) <= MOST_TENSORS and tensor_lists.fits(tensors)
    return True


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """y = x / sqrt(mean(x^2) + epsilon) * weight over the last dim, by ``rmsnorm_fwd(x, weight, epsilon, out,
    quantizer, dtype, sm_margin, zero_centered_gamma)`` and its like on rows ``[rows, n]``."""
    return _Norm.apply(x, weight, None, epsilon)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    """y = (x - mean) / sqrt(variance + epsilon) * weight + bias over the last dim, by ``layernorm_fwd``, as above."""
    return _Norm.apply(x, weight, bias, epsilon)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> Tensor:
        import transformer_engine_torch as engine
        from transformer_engine.pytorch.constants import TE_DType

        rows = x.reshape(-1, x.shape[-1]).contiguous()
        given = (epsilon, None, None, TE_DType[x.dtype], SM_MARGIN, ZERO_CENTERED)
        if bias is None:
            y, mean, rstd = engine.rmsnorm_fwd(rows, weight, *given)
        else:
            y, mean, rstd = engine.layernorm_fwd(rows, weight, bias, *given)
        ctx.save_for_backward(rows, weight, mean, rstd)
        ctx.centered = bias is not None
        return y.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        import transformer_engine_torch as engine

        rows, weight, mean, rstd = ctx.saved_tensors
        given = dy.reshape(rows.shape).contiguous(), rows
        if ctx.centered:
            dx, dweight, dbias = engine.layernorm_bwd(*given, mean, rstd, weight, SM_MARGIN, ZERO_CENTERED)
        else:
            (dx, dweight), dbias = engine.rmsnorm_bwd(*given, rstd, weight, SM_MARGIN, ZERO_CENTERED), None
        return dx.view(dy.shape), dweight, dbias, None


def bias_activation(x: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    """y = f(x + bias), the sum in the precision of ``x``, by ``gelu(x, quantizer)``, ``dgelu(dy, x, quantizer)`` and
    their like on rows ``[rows, n]``."""
    return _Activation.apply(x if bias is None else x + bias, ACTIVATIONS[kind])


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        import transformer_engine_torch as engine

        rows = x.reshape(-1, x.shape[-1]).contiguous()
        ctx.save_for_backward(rows)
        ctx.name, ctx.shape = name, x.shape
        return getattr(engine, name)(rows, None).view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        import transformer_engine_torch as engine

        (rows,) = ctx.saved_tensors
        dy_rows = dy.reshape(len(rows), -1).contiguous()
        return getattr(engine, f"d{ctx.name}")(dy_rows, rows, None).view(ctx.shape), None


def attention_softmax(scores: Tensor, mask: Tensor | None, scale: float, causal: bool, window: int | None) -> Tensor:
    """Softmax of ``scale * scores`` by ``<name>_forward(scores, [mask,] scale)`` and ``<name>_backward(dprobs, probs,
    scale)`` for the form (``fused_softmax``); they make a row zero that sees nothing."""
    import transformer_engine_torch as engine

    form = fused_softmax.form_of(scores, mask, causal, window)
    kernel = Kernel(*(getattr(engine, f"{SOFTMAXES[form]}_{way}") for way in ("forward", "backward")))
    return fused_softmax.attention_softmax(scores, mask, scale, form, kernel)


def rope(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Pairs of channels turned by ``apply_rotary_pos_emb(x, angles, tensor_format, interleaved=, fused=)`` on ``[s, b,
    h, d]`` of any strides; the float32 angles ``[s, 1, 1, r]`` are those of the tables, right to a rounding or two.
    RuntimeError, on a GPU an assertion of the device, where a pair of table entries is no cosine and sine."""
    from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb

    torch._assert_async(
        (cos.square() + sin.square() - 1).abs().max() < 1e-5,
        "kernel_backend='transformer_engine': rope takes angles, and the tables are no cosines and sines; "
        "or take kernel_backend='auto'",
    )
    angles = fused_rope.for_each_channel(torch.atan2(sin, cos), interleaved)
    given = fused_rope.four_dims(x, cos)
    return apply_rotary_pos_emb(given, angles, tensor_format="sbhd", interleaved=interleaved, fused=True).view(x.shape)


def squared_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Sum of x^2 over all elements of all tensors, by ``multi_tensor_l2norm``."""
    import transformer_engine_torch as engine

    return tensor_lists.squared_norm(engine.multi_tensor_l2norm, tensors)


def scale_(tensors: Sequence[Tensor], factor: float) -> None:
    """x = factor * x in place, by ``multi_tensor_scale``."""
    import transformer_engine_torch as engine

    tensor_lists.apply(engine.multi_tensor_scale, tensors, tensors, numbers=(factor,))


def adamw_(
    grads: Sequence[Tensor],
    weights: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    copies: Sequence[Tensor],
    *,
    step: int,
    factor: float,
    **rates: float,
) -> None:
    """AdamW by ``multi_tensor_adam``, which takes gradients of any type and, as lists [grads, copies, exp_avgs,
    exp_avg_sqs, weights], writes the copies too; a factor takes a pass before it."""
    import transformer_engine_torch as engine

    grads = tensor_lists.scaled_grads(engine.multi_tensor_scale, grads, weights, factor, widen=False)
    lists = (grads, copies, exp_avgs, exp_avg_sqs, weights) if copies else (grads, weights, exp_avgs, exp_avg_sqs)
    numbers = tensor_lists.adamw_numbers(step, **rates)
    tensor_lists.apply(engine.multi_tensor_adam, *lists, numbers=numbers)
