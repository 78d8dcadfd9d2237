"""Operations by NVIDIA's apex (https://github.com/NVIDIA/apex), for comparison on GPUs; never needed.

Loaded only where ``kernel_backend='apex'`` asks for it. It has to be built from its sources, with its CUDA extensions:
the package ``apex`` of the Python package index is another one. Its functions take less than ours do: ``covers`` and
``fits`` say which calls they serve; ``auto`` serves the others. Of rope the names with ``_cached`` are needed, which
older builds lack.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_core.ops.libraries import fused_rope, fused_softmax, tensor_lists
from megatron_core.ops.libraries.fused_softmax import HALVES, Kernel

EXTENSIONS = {
    "layer_norm": ("fused_layer_norm_cuda",),
    "multi_tensor": ("amp_C",),
    "rms_norm": ("fused_layer_norm_cuda",),
    "rope": ("fused_rotary_positional_embedding",),
    "softmax": (
        "scaled_upper_triang_masked_softmax_cuda",
        "scaled_masked_softmax_cuda",
        "generic_scaled_masked_softmax_cuda",
        "scaled_softmax_cuda",
    ),
    "weight_grad": ("fused_weight_gradient_mlp_cuda",),
}
"""The compiled modules behind each operation."""
OPS = tuple(EXTENSIONS)
"""The operations that it has an equivalent of."""
DTYPES = {"rope": (torch.float32,), "softmax": HALVES, "weight_grad": HALVES}
"""Where its equivalent is for fewer data types than the others'. In 16 bits its rope rounds cosines and sines to them,
so that pairs turn by other angles; in float32 its products may be those of fewer bits, as cuBLAS is set."""
LIMITED = frozenset({"multi_tensor", "rope", "softmax", "weight_grad"})
"""The operations of which it takes some calls only."""
MOST_KEYS_OF_ANY_NUMBER = 8192
"""To which apex's own tests of the kernel go that takes any number of keys and queries."""


def why_not(op: str, device_type: str, dtype: torch.dtype) -> str | None:
    """Why apex cannot serve an operation that it has for tensors of a kind; None if it can."""
    if _is_absent("apex"):
        return "apex is not installed; build apex from https://github.com/NVIDIA/apex"
    absent = next(filter(_is_absent, EXTENSIONS[op]), None)
    if absent is not None:
        return f"apex's extension {absent} is not installed; build apex from https://github.com/NVIDIA/apex with it"
    if device_type != "cuda":
        return f"apex is for cuda, not {device_type}"
    return None if dtype != torch.float64 else f"apex has no {dtype}"


@cache
def _is_absent(module: str) -> bool:
    return find_spec(module) is None


def covers(op: str, dtype: torch.dtype) -> bool:
    """Whether apex has an equivalent of ``op`` for ``dtype``; float64, which it has for none, ``why_not`` refuses."""
    return op in OPS and (dtype == torch.float64 or dtype in DTYPES.get(op, (torch.float32, *HALVES)))


def fits(op: str, *arguments: Any) -> bool:
    """Whether the equivalent of an operation takes a call, of which ``arguments`` are those that decide it."""
    if op == "softmax":
        return _softmax_kernel(*arguments) is not None
    if op == "rope":
        *tensors, interleaved = arguments
        return not interleaved and fused_rope.fits(*tensors)
    if op == "multi_tensor":
        return tensor_lists.fits(*arguments)
    if op == "weight_grad":
        main_grad, x = arguments
        return main_grad.is_contiguous() and main_grad.dtype in (torch.float32, x.dtype) and len(x) > 0
    return True


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """y = x / sqrt(mean(x^2) + epsilon) * weight over the last dim, by ``apex.normalization``."""
    from apex.normalization.fused_layer_norm import fused_rms_norm_affine

    return fused_rms_norm_affine(x, weight, list(weight.shape), epsilon)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    """y = (x - mean) / sqrt(variance + epsilon) * weight + bias over the last dim, by ``apex.normalization``."""
    from apex.normalization.fused_layer_norm import fused_layer_norm_affine

    return fused_layer_norm_affine(x, weight, bias, list(weight.shape), epsilon)


def attention_softmax(scores: Tensor, mask: Tensor | None, scale: float, causal: bool, window: int | None) -> Tensor:
    """Softmax of ``scale * scores`` by the extension for the form (``fused_softmax``), each with ``forward(scores,
    [mask,] scale)`` and ``backward(dprobs, probs, scale)``; to 16,384 keys since apex's #1558 of 2022."""
    module = import_module(_softmax_kernel(scores, mask, causal, window))

    def masked(given: Tensor, hidden: Tensor, factor: float) -> Tensor:
        # Until apex's #1390 of 2022 was mended, a row that sees nothing saw all alike.
        return module.forward(given, hidden, factor).masked_fill_(hidden, 0.0)

    kernel = Kernel(module.forward if mask is None else masked, module.backward)
    return fused_softmax.attention_softmax(
        scores, mask, scale, fused_softmax.form_of(scores, mask, causal, window), kernel
    )


def _softmax_kernel(scores: Tensor, mask: Tensor | None, causal: bool, window: int | None) -> str | None:
    """The extension that takes a call, if one does."""
    form = fused_softmax.form_of(scores, mask, causal, window)
    if form is None:
        return None
    if fused_softmax.fits_warps(scores, form):
        names = ("scaled_upper_triang_masked_softmax_cuda", "scaled_masked_softmax_cuda", "scaled_softmax_cuda")
        return dict(zip(("triangle", "masked", "whole"), names, strict=True)).get(form)
    small = scores.shape[-1] <= MOST_KEYS_OF_ANY_NUMBER and 0 < scores.numel() <= fused_softmax.MOST_ELEMENTS
    return "generic_scaled_masked_softmax_cuda" if form == "masked" and small else None


def rope(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Pairs of channels turned, half-split, by ``forward_cached(x, cos, sin, transposed)`` and ``backward_cached(dy,
    cos, sin, transposed)`` on ``[s, b, h, d]`` of any strides and float32 tables ``[s, 1, 1, r]``."""
    tables = (fused_rope.for_each_channel(table) for table in (cos, sin))
    return _Rope.apply(fused_rope.four_dims(x, cos), *tables).view(x.shape)


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        import fused_rotary_positional_embedding

        ctx.save_for_backward(cos, sin)
        return fused_rotary_positional_embedding.forward_cached(x, cos, sin, False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        import fused_rotary_positional_embedding

        return fused_rotary_positional_embedding.backward_cached(dy, *ctx.saved_tensors, False), None, None


def squared_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Sum of x^2 over all elements of all tensors, by ``amp_C.multi_tensor_l2norm``."""
    import amp_C

    return tensor_lists.squared_norm(amp_C.multi_tensor_l2norm, tensors)


def scale_(tensors: Sequence[Tensor], factor: float) -> None:
    """x = factor * x in place, by ``amp_C.multi_tensor_scale``."""
    import amp_C

    tensor_lists.apply(amp_C.multi_tensor_scale, tensors, tensors, numbers=(factor,))


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
    """AdamW by ``amp_C.multi_tensor_adam``, whose lists are all of one type and which has neither factor nor copies:
    ``multi_tensor_scale`` before and after it."""
    import amp_C

    apply, numbers = tensor_lists.apply, tensor_lists.adamw_numbers(step, **rates)
    grads = tensor_lists.scaled_grads(amp_C.multi_tensor_scale, grads, weights, factor, widen=True)
    apply(amp_C.multi_tensor_adam, grads, weights, exp_avgs, exp_avg_sqs, numbers=numbers)
    if copies:
        apply(amp_C.multi_tensor_scale, weights, copies, numbers=(1.0,))


def accumulate_weight_grad_(main_grad: Tensor, grad_y: Tensor, x: Tensor) -> None:
    """main_grad_OI += grad_y_TO^T x_TI in float32, by ``wgrad_gemm_accum_fp32(x, grad_y, main_grad)`` or, where
    ``main_grad`` has 16 bits too, ``wgrad_gemm_accum_fp16``; they take contiguous matrices for granted."""
    import fused_weight_gradient_mlp_cuda as products

    wide = main_grad.dtype == torch.float32
    product = products.wgrad_gemm_accum_fp32 if wide else products.wgrad_gemm_accum_fp16
    product(x.contiguous(), grad_y.contiguous(), main_grad)
