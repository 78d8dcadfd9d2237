"""What apex's and Transformer Engine's functions on lists of tensors have in common: they are of one origin.

Each takes the size of a chunk, an int32 tensor that it sets to 1 where it meets what is not finite, and the lists:
``multi_tensor_l2norm(chunk, flag, [xs], per_tensor) -> (norm, norms)``, ``multi_tensor_scale(chunk, flag, [xs, ys],
factor)``, which writes y = factor * x in the type of the ys, and ``multi_tensor_adam(chunk, flag, [grads, weights,
exp_avgs, exp_avg_sqs], lr, beta1, beta2, epsilon, step, mode, bias_correction, weight_decay)``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

CHUNK = 2048 * 32
"""The chunk that both libraries' own callers take."""
MOST_ELEMENTS = 2**31 - CHUNK
"""Of one tensor: offsets have 32 bits."""
DECOUPLED, CORRECTED = 1, 1
"""``mode`` and ``bias_correction`` of ``multi_tensor_adam`` as AdamW has them."""


def fits(tensors: Sequence[Tensor]) -> bool:
    """Whether none is larger than they can address, and there is something to do."""
    sizes = [tensor.numel() for tensor in tensors]
    return any(sizes) and max(sizes) <= MOST_ELEMENTS


def apply(function: Callable, *lists: Sequence[Tensor], numbers: tuple = ()) -> object:
    """``function`` on lists that belong together, without their empty tensors: where the last tensor is empty, the
    functions would leave out those before it. The flag is new each time, and nobody reads it."""
    kept = [of_one for of_one in zip(*lists, strict=True) if of_one[0].numel()]
    flag = torch.zeros(1, dtype=torch.int32, device=kept[0][0].device)
    return function(CHUNK, flag, [list(of_one) for of_one in zip(*kept, strict=True)], *numbers)


def squared_norm(l2norm: Callable, tensors: Sequence[Tensor]) -> Tensor:
    """Sum of x^2 over all elements, float64, of a norm that is summed up in float32."""
    norm, _ = apply(l2norm, tensors, numbers=(False,))
    return norm.double().square().reshape(())


def adamw_numbers(
    step: int, *, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float
) -> tuple[float, ...]:
    """What follows the lists of ``multi_tensor_adam``: step t, from 1, of AdamW with a corrected bias (Loshchilov and
    Hutter 2019, algorithm 2)."""
    return lr, beta1, beta2, eps, step, DECOUPLED, CORRECTED, weight_decay


def scaled_grads(
    scale: Callable, grads: Sequence[Tensor], weights: Sequence[Tensor], factor: float, *, widen: bool
) -> Sequence[Tensor]:
    """factor * gradient: in place, or where a gradient has fewer bits than its weight, and has to be scaled or is to be
    widened, as a new tensor of the weight's type."""
    narrow = grads[0].dtype != weights[0].dtype
    if factor == 1.0 and not (narrow and widen):
        return grads
    scaled = [torch.empty_like(weight) for weight in weights] if narrow else grads
    apply(scale, grads, scaled, numbers=(factor,))
    return scaled
