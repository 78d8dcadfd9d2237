"""What apex's and Transformer Engine's softmax kernels have in common, as both descend from Megatron-LM's.

There is a kernel for each form: ``whole`` and ``masked`` scores ``[b, h, queries, keys]``, the latter with a mask
``[b or 1, 1, queries, keys]`` of bytes, 1 = masked; a ``triangle`` of as many queries as keys, ``[b h, keys, keys]``;
and ``aligned``, whose last query sees the last key. Forward takes the scores (and the mask) and the scale; backward
the gradient, the probabilities and the scale. All are of 16 bits and read as packed, whatever their strides.

A key that ``masked`` and ``aligned`` hide counts as one whose scaled score is -10,000: their rows are right as long as
what a query sees has a scaled score well above that, and a row that sees nothing is zero.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Form = Literal["whole", "masked", "triangle", "aligned"]

HALVES = (torch.bfloat16, torch.float16)
"""The data types that these kernels take."""
MOST_KEYS = 16384
MOST_ELEMENTS = 2**31 - 1
"""What their 32-bit offsets reach."""


@dataclass(frozen=True)
class Kernel:
    """Both passes of one form."""

    forward: Callable[..., Tensor]
    backward: Callable[[Tensor, Tensor, float], Tensor]


def form_of(scores: Tensor, mask: Tensor | None, causal: bool, window: int | None) -> Form | None:
    """The form that a call of ``ops.attention_softmax`` has; None for those that no kernel has: a window, a triangle
    and a mask together, a mask that differs between heads."""
    if not 2 <= scores.dim() <= 4 or window is not None or (causal and mask is not None):
        return None
    if mask is not None:
        shape = _four(mask.shape)
        return "masked" if len(shape) == 4 and shape[1] == 1 and shape[0] in (1, _four(scores.shape)[0]) else None
    if not causal:
        return "whole"
    return "triangle" if scores.shape[-2] == scores.shape[-1] else "aligned"


def fits_warps(scores: Tensor, form: Form) -> bool:
    """Whether the kernel of a form, whose blocks are four warps, takes scores of such a size: up to 128 keys a block
    computes eight rows, else four, of ``whole`` and ``masked`` scores of one head, of the ``triangle`` one of each."""
    *heads, queries, keys = scores.shape
    rows = 8 if keys <= 128 else 4
    divided = {"whole": queries, "masked": queries, "triangle": prod(heads), "aligned": rows}[form]
    within = 16 < keys <= MOST_KEYS and keys % 8 == 0 and 0 < scores.numel() <= MOST_ELEMENTS
    return within and divided % rows == 0


def attention_softmax(scores: Tensor, mask: Tensor | None, scale: float, form: Form, kernel: Kernel) -> Tensor:
    """exp(scale * scores) / sum of the same over the keys that a query sees; 0 for the others."""
    if torch.tensor(scale, dtype=scores.dtype, device="cpu").item() != scale:
        # Their forward pass rounds the scale to the scores' type, by up to 0.4 % in bfloat16. Of scores that are scaled
        # before, each is rounded for itself, as in plain PyTorch.
        scores, scale = scores * scale, 1.0
    batch, heads, queries, keys = _four(scores.shape)
    given = scores.reshape((batch * heads, queries, keys) if form == "triangle" else (batch, heads, queries, keys))
    if mask is not None:
        mask = _packed(mask.reshape(_four(mask.shape)).expand(-1, 1, queries, keys))
    return _Softmax.apply(given, mask, float(scale), kernel).view(scores.shape)


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, mask: Tensor | None, scale: float, kernel: Kernel) -> Tensor:
        probs = kernel.forward(*(_packed(scores), *(() if mask is None else (mask,))), scale)
        ctx.save_for_backward(probs)
        ctx.scale, ctx.kernel = scale, kernel
        return probs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dprobs: Tensor) -> tuple[Tensor | None, ...]:
        (probs,) = ctx.saved_tensors
        # A copy, as they write their result in its place, and autograd may hand the same tensor to others.
        dprobs = dprobs.clone(memory_format=torch.contiguous_format)
        return ctx.kernel.backward(dprobs, probs, ctx.scale), None, None, None


def _packed(x: Tensor) -> Tensor:
    """``x`` contiguous, and where four of its elements can be read at a time."""
    x = x.contiguous()
    return x if x.data_ptr() % (4 * x.element_size()) == 0 else x.clone()


def _four(sizes: tuple[int, ...]) -> tuple[int, ...]:
    return (1,) * (4 - len(sizes)) + tuple(sizes)
