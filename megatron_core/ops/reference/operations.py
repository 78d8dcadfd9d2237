"""The reference implementation of every operation but dropout in PyTorch, in any precision.

These run where no native kernel is available, with PyTorch's own backward; if PyTorch has the function, they call it.
Shapes are those of ``megatron_core.ops``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.optim.adamw import adamw

from megatron_core.ops.rows import wide


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """y = x / sqrt(mean(x^2) + epsilon) * weight over the last dim (Zhang and Sennrich 2019)."""
    return functional.rms_norm(x, weight.shape, weight, epsilon)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    """y = (x - mean) / sqrt(variance + epsilon) * weight + bias over the last dim (Ba et al. 2016)."""
    return functional.layer_norm(x, weight.shape, weight, bias, epsilon)


def bias_activation(x: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    """y = f(x + bias), the sum in the precision of ``x``; a gated f halves the last dim."""
    return FUNCTIONS[kind](x if bias is None else x + bias)


def squared_relu(x: Tensor) -> Tensor:
    """relu(x)^2 (So et al. 2021)."""
    return torch.relu(x).square()


def gated(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """function(gate) * value, ``x`` ``[..., 2 m]`` being the gate and then the value (Shazeer 2020)."""
    gate, value = x.chunk(2, dim=-1)
    return function(gate) * value


gelu_tanh = partial(functional.gelu, approximate="tanh")

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_tanh": gelu_tanh,
    "squared_relu": squared_relu,
    "swiglu": partial(gated, functional.silu),
    "geglu": partial(gated, functional.gelu),
    "geglu_tanh": partial(gated, gelu_tanh),
}
"""The activations by name; GELU: Hendrycks and Gimpel 2016."""


def attention_softmax(scores: Tensor, mask: Tensor | None, scale: float, causal: bool, window: int | None) -> Tensor:
    """softmax(scale * scores) over the keys that ``mask``, the triangle and the window leave, 0 for the others.

    ``scores`` ``[..., queries, keys]``; ``mask`` broadcasts to it, True = masked.
    """
    hidden, (queries, keys) = mask, scores.shape[-2:]
    if causal or window is not None:
        hidden = _outside(queries, keys, window, scores.device)
        hidden = hidden if mask is None else hidden | mask
    if hidden is None:
        return (scores * scale).softmax(-1)
    probs = (scores * scale).masked_fill(hidden, -torch.inf).softmax(-1)
    if mask is None and queries <= keys:
        return probs
    return probs.masked_fill(hidden, 0.0)  # a row that sees nothing is NaN so far


def _outside(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """``[queries, keys]``, True where the key is after the query or before its window; the last ones are at one
    place."""
    own = keys - queries
    seen = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(own)
    return ~(seen if window is None else seen.triu(own - window + 1))


def rope(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Pairs (a, b) of channels -> (a cos - b sin, b cos + a sin), in the tables' precision, and then as ``x`` has it;
    shapes as in ``ops.rope`` (Su et al. 2021, section 3.4.2)."""
    for _ in range(x.dim() - cos.dim()):
        cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    rotated = 2 * cos.shape[-1]
    turned, passed = x[..., :rotated], x[..., rotated:]
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, dim=-1)
    pairs = a * cos - b * sin, b * cos + a * sin
    turned = torch.stack(pairs, dim=-1).flatten(-2) if interleaved else torch.cat(pairs, dim=-1)
    turned = turned.to(x.dtype)
    return torch.cat([turned, passed], dim=-1) if passed.shape[-1] else turned


def cross_entropy_parts(logits: Tensor, target: Tensor, first: int, valid: int) -> Tensor:
    """``[4, ...]``: m = max(z), sum(exp(z - m)), the target's z (0 where it is elsewhere), sum(z); z the first
    ``valid`` columns of ``logits`` ``[..., v]``, which are the tokens from ``first`` on."""
    z = logits.to(wide(logits.dtype), copy=True)
    z[..., valid:] = -torch.inf
    maximum = z.amax(-1)
    here, label = _label(target, first, valid)
    z_target = z.gather(-1, label).squeeze(-1).masked_fill(~here, 0.0)
    z_sum = z[..., :valid].sum(-1)
    z -= maximum.masked_fill(maximum == -torch.inf, 0.0).unsqueeze(-1)  # an infinity less itself would be NaN
    return torch.stack([maximum, z.exp_().sum(-1), z_target, z_sum])


def cross_entropy_backward(
    dloss: Tensor,
    logits: Tensor,
    target: Tensor,
    statistics: Tensor,
    first: int,
    valid: int,
    kept: float,
    spread: float,
    overwrite: bool,
) -> Tensor:
    """dloss * (exp(z - m) / s - kept [target] - spread), 0 in the padding; ``statistics`` ``[2, ...]`` are m and s
    over the whole vocabulary. With ``overwrite`` it takes the place of the logits."""
    maximum, exp_sum = statistics.unsqueeze(-1)
    dloss = dloss.unsqueeze(-1)
    grad = logits if overwrite and logits.dtype == wide(logits.dtype) else logits.to(wide(logits.dtype), copy=True)
    grad.sub_(maximum).exp_().mul_(dloss / exp_sum).sub_(spread * dloss)
    here, label = _label(target, first, valid)
    grad.scatter_add_(-1, label, -kept * dloss * here.unsqueeze(-1))
    grad[..., valid:] = 0.0
    return logits.copy_(grad) if overwrite else grad.to(logits.dtype)


def _label(target: Tensor, first: int, valid: int) -> tuple[Tensor, Tensor]:
    """Whether each target is a valid column here, and which ``[..., 1]``; 0 where it is not."""
    here = (target >= first) & (target < first + valid)
    return here, (target - first).masked_fill(~here, 0).unsqueeze(-1)


BLOCK = 512
"""Elements whose squares are added up in float32: with 4,096 the error is 3e-9, of 16-bit tensors 5e-7."""


def squared_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Sum of x^2 over all elements of all tensors, float64: norms of blocks in float32 (float64 of float64), squared
    and added up in float64.

    PyTorch's float32 norm of a whole tensor is wrong by 3e-3 at 40 M elements on a CPU and by 1e-2 at 100 M; this one
    by 2e-10 (16 bits: 2e-8), in the same time. In float64 PyTorch takes ten times as long.
    """
    blocks = [part for x in tensors for part in _blocks(x.view(-1))]
    norms = [torch.linalg.vector_norm(rows, dim=1, dtype=wide(rows.dtype)).double() for rows in blocks]
    return torch.cat(norms).square().sum()


def _blocks(x: Tensor) -> tuple[Tensor, Tensor]:
    """Views of ``x`` ``[n]``: ``[blocks, BLOCK]``, and what is left over as ``[1, rest]``."""
    whole = x.numel() // BLOCK * BLOCK
    return x[:whole].view(-1, BLOCK), x[whole:].view(1, -1)


def scale_(tensors: Sequence[Tensor], factor: float) -> None:
    """x = factor * x, in place."""
    for x in tensors:
        x.mul_(factor)


def adamw_(
    grads: Sequence[Tensor],
    weights: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    copies: Sequence[Tensor],
    *,
    step: int,
    factor: float,
    **rates: Any,
) -> None:
    """torch.optim.AdamW's fused step, after a factor on the gradients and before the copies; ``rates`` by its names."""
    grads = [grad.to(weight.dtype) for grad, weight in zip(grads, weights, strict=True)]
    if factor != 1.0:
        scale_(grads, factor)
    steps_before = [torch.full((), step - 1.0, device=weight.device) for weight in weights]
    state = (grads, list(exp_avgs), list(exp_avg_sqs), list[Tensor](), steps_before)
    adamw(list(weights), *state, fused=True, amsgrad=False, maximize=False, **rates)
    for copy, weight in zip(copies, weights, strict=False):
        copy.copy_(weight)
