"""The reference implementation of every operation in PyTorch, in any precision.

These functions run if no native kernel is available, with PyTorch's own backward; they call PyTorch's function if there
is one. Shapes are those of ``megatron_core.ops``.
"""

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


def bias_activation(
    x: Tensor, bias: Tensor | None, activation: str, limit: float | None = None, offset: float = 0.0
) -> Tensor:
    """y = f(x + bias), the sum in the precision of ``x``; a gated f halves the last dim. ``limit`` and ``offset`` of a
    gated f: as in ``gated``."""
    total = x if bias is None else x + bias
    return gated(GATES[activation], total, limit, offset) if activation in GATES else FUNCTIONS[activation](total)


def squared_relu(x: Tensor) -> Tensor:
    """relu(x)^2 (So et al. 2021)."""
    return torch.relu(x).square()


XIELU_BETA = 0.5
XIELU_EPSILON = -1e-6
"""Slope of xIELU at 0, and the largest input of its exponential."""


def xielu(x: Tensor, bias: Tensor | None, alpha_p: Tensor, alpha_n: Tensor) -> Tensor:
    """xIELU of x + bias with ``alpha_p`` and ``alpha_n`` ``[1]`` (Huang and Schlag 2024, arXiv 2411.13010).

    With a = softplus(alpha_p), c = b + softplus(alpha_n) and b = 0.5: a x^2 + b x for x > 0, else
    c (exp(x) - 1 - x) + b x.
    """
    total = x if bias is None else x + bias
    positive = functional.softplus(alpha_p)
    negative = XIELU_BETA + functional.softplus(alpha_n)
    below = negative * (torch.expm1(total.clamp(max=XIELU_EPSILON)) - total)
    return torch.where(total > 0, positive * total * total, below) + XIELU_BETA * total


def gated(function: Callable[[Tensor], Tensor], x: Tensor, limit: float | None = None, offset: float = 0.0) -> Tensor:
    """function(gate) * (value + offset); ``x`` ``[..., 2 m]`` is the gate followed by the value (Shazeer 2020).

    With ``limit`` v the gate is min(gate, v), and the value is bounded by -v and v.
    """
    gate, value = x.chunk(2, dim=-1)
    if limit is not None:
        gate = gate.clamp(max=limit)
        value = value.clamp(-limit, limit)
    return function(gate) * (value + offset if offset else value)


def quick_gelu(x: Tensor) -> Tensor:
    """x sigmoid(1.702 x) (Hendrycks and Gimpel 2016)."""
    return x * torch.sigmoid(1.702 * x)


gelu_tanh = partial(functional.gelu, approximate="tanh")

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_tanh": gelu_tanh,
    "squared_relu": squared_relu,
    "relu": functional.relu,
}
"""Activation functions by name; GELU: Hendrycks and Gimpel 2016."""
GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": functional.silu,
    "geglu": functional.gelu,
    "geglu_tanh": gelu_tanh,
    "quick_geglu": quick_gelu,
}
"""Functions of the gate by the name of the gated activation."""


def attention_softmax(scores: Tensor, mask: Tensor | None, scale: float, causal: bool, window: int | None) -> Tensor:
    """softmax(scale * scores) over the keys visible under ``mask``, ``causal`` and ``window``; 0 for the others.

    ``scores`` ``[..., queries, keys]``; ``mask`` broadcasts to it, True = masked.
    """
    # Without any hidden key no mask is built.
    hidden = mask
    (queries, keys) = scores.shape[-2:]
    if causal or window is not None:
        hidden = _outside(queries, keys, window, scores.device)
        hidden = hidden if mask is None else hidden | mask
    if hidden is None:
        return (scores * scale).softmax(-1)
    probs = (scores * scale).masked_fill(hidden, -torch.inf).softmax(-1)
    if mask is None and queries <= keys:
        return probs
    return probs.masked_fill(hidden, 0.0)  # rows without visible keys are NaN before this


def _outside(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """``[queries, keys]``, True if the key is after the query or before its window; the last query and the last key
    have the same position."""
    last_diagonal = keys - queries
    seen = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(last_diagonal)
    return ~(seen if window is None else seen.triu(last_diagonal - window + 1))


def rope(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Pairs (a, b) of channels -> (a cos - b sin, b cos + a sin), computed in the tables' precision and cast to the
    dtype of ``x``; shapes as in ``ops.rope`` (Su et al. 2021, section 3.4.2)."""
    for _ in range(x.dim() - cos.dim()):
        cos = cos.unsqueeze(-2)
        sin = sin.unsqueeze(-2)
    rotated = 2 * cos.shape[-1]
    turned = x[..., :rotated]
    passed = x[..., rotated:]
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, dim=-1)
    pairs = a * cos - b * sin, b * cos + a * sin
    turned = torch.stack(pairs, dim=-1).flatten(-2) if interleaved else torch.cat(pairs, dim=-1)
    turned = turned.to(x.dtype)
    return torch.cat([turned, passed], dim=-1) if passed.shape[-1] else turned


def cross_entropy_parts(logits: Tensor, target: Tensor, first: int, valid: int) -> Tensor:
    """``[4, ...]``: m = max(z), sum(exp(z - m)), the target's z (0 if the target is in another part), sum(z); z are the
    first ``valid`` columns of ``logits`` ``[..., v]``, the logits of tokens ``first``, ``first`` + 1, ...."""
    # A copy, because the exponentials are computed in place.
    z = logits.to(wide(logits.dtype), copy=True)
    z[..., valid:] = -torch.inf
    maximum = z.amax(-1)
    is_local, label = _label(target, first, valid)
    z_target = z.gather(-1, label).squeeze(-1).masked_fill(~is_local, 0.0)
    z_sum = z[..., :valid].sum(-1)
    z -= maximum.masked_fill(maximum == -torch.inf, 0.0).unsqueeze(-1)  # inf - inf would be NaN
    return torch.stack([maximum, z.exp_().sum(-1), z_target, z_sum])


def cross_entropy_backward(
    dloss: Tensor,
    logits: Tensor,
    target: Tensor,
    statistics: Tensor,
    first: int,
    valid: int,
    target_share: float,
    spread: float,
    overwrite: bool,
) -> Tensor:
    """dloss * (exp(z - m) / s - kept [target] - spread), 0 in the padding; ``statistics`` ``[2, ...]`` are m and s
    over the whole vocabulary. With ``overwrite`` the result is written to ``logits``."""
    maximum, exp_sum = statistics.unsqueeze(-1)
    dloss = dloss.unsqueeze(-1)
    # In 16 bits p - 1 at the target would lose its digits, so the gradient is computed in a wide copy even if it is
    # written back.
    grad = logits if overwrite and logits.dtype == wide(logits.dtype) else logits.to(wide(logits.dtype), copy=True)
    # In place: each temporary would be a tensor of the size of the logits.
    grad.sub_(maximum).exp_().mul_(dloss / exp_sum).sub_(spread * dloss)
    is_local, label = _label(target, first, valid)
    grad.scatter_add_(-1, label, -target_share * dloss * is_local.unsqueeze(-1))
    grad[..., valid:] = 0.0
    return logits.copy_(grad) if overwrite else grad.to(logits.dtype)


def _label(target: Tensor, first: int, valid: int) -> tuple[Tensor, Tensor]:
    """Whether each target is a valid column of this part, and its column ``[..., 1]`` (0 if it is not)."""
    is_local = (target >= first) & (target < first + valid)
    return is_local, (target - first).masked_fill(~is_local, 0).unsqueeze(-1)


BLOCK = 512
"""Number of squares accumulated in float32: with 4,096 the error is 3e-9, for 16-bit tensors 5e-7."""


def squared_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Sum of x^2 over all elements of all tensors, float64: norms of blocks in float32 (float64 for float64), squared
    and summed in float64.

    On a CPU PyTorch's float32 norm of a whole tensor has an error of 3e-3 at 40 M elements and 1e-2 at 100 M; this
    function has an error of 2e-10 (16 bits: 2e-8) in the same time. PyTorch's norm in float64 takes ten times as long.
    """
    blocks = [block for x in tensors for block in _blocks(x.view(-1))]
    norms = [torch.linalg.vector_norm(rows, dim=1, dtype=wide(rows.dtype)).double() for rows in blocks]
    return torch.cat(norms).square().sum()


def _blocks(x: Tensor) -> tuple[Tensor, Tensor]:
    """Views of ``x`` ``[n]``: ``[blocks, BLOCK]``, and the remainder ``[1, rest]``."""
    covered = x.numel() // BLOCK * BLOCK
    return x[:covered].view(-1, BLOCK), x[covered:].view(1, -1)


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
    """Scale the gradients, run torch.optim.AdamW's fused step with its arguments ``rates``, and write the copies."""
    # torch's fused step requires gradients and weights of one dtype.
    grads = [grad.to(weight.dtype) for grad, weight in zip(grads, weights, strict=True)]
    if factor != 1.0:
        scale_(grads, factor)
    steps_before = [torch.full((), step - 1.0, device=weight.device) for weight in weights]
    state = (grads, list(exp_avgs), list(exp_avg_sqs), list[Tensor](), steps_before)
    adamw(list(weights), *state, fused=True, amsgrad=False, maximize=False, **rates)
    for copy, weight in zip(copies, weights, strict=False):
        copy.copy_(weight)


# The dropout mask is a function of an element's global position. An element has a sample (the global index of its
# sequence, below 2^48), a position in the whole sequence, a head (0 except in attention weights), and a channel (the
# last dim; in attention weights the position of the key). The four 32-bit words
#     philox(counter = (channel / 8, position, sample mod 2^32, sample / 2^32 + 2^16 head), key)
# contain 16 bits for each of eight adjacent channels, the lower half of a word first; the key is derived from the seed
# and the module's name. An element is dropped if its bits are below 2^16 p, rounded to an integer; the other elements
# are divided by their exact share. The mask therefore depends neither on the layout nor on a generator. The native
# kernels use the same bits (csrc/common/dropout.h); 32 bits per element would double their computation.
LOW = 2**32 - 1
"""The lower 32 bits."""

_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four random words for each counter: Philox 4x32 with 10 rounds (Salmon et al. 2011, section 3.3).

    Words are int64 tensors with 32-bit values, which broadcast; ``key`` has 64 bits.
    """
    a, b, c, d = counter
    low, high = key & LOW, key >> 32
    for _ in range(_ROUNDS):
        (a_high, a_low), (c_high, c_low) = (_product(x, m) for x, m in zip((a, c), _MULTIPLIERS, strict=True))
        a = c_high ^ b ^ low
        b = c_low
        c = a_high ^ d ^ high
        d = a_low
        low, high = ((k + step) & LOW for k, step in zip((low, high), _KEY_STEPS, strict=True))
    return a, b, c, d


def _product(x: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """The upper and the lower 32 bits of x m; both are correct even if the int64 product is negative."""
    # The low 64 bits of a product do not depend on signs; the masks remove the copies of the sign bit.
    product = x * m
    return (product >> 32) & LOW, product & LOW


def dropout_threshold(p: float) -> int:
    """Elements whose 16 bits are below this threshold are dropped."""
    return min(round(p * 2**16), 2**16 - 1)


def dropout_scale(p: float) -> float:
    """1 / (share of elements that are kept)."""
    return 1 / (1 - dropout_threshold(p) / 2**16)


def keep(shape: tuple[int, ...], p: float, *of: Any, **of_named: Any) -> Tensor:
    """True where an element of ``[s, b, h]``, or of attention weights ``[b, heads, s, t]``, is kept; the other
    arguments are those of ``random_bits``."""
    return random_bits(shape, *of, **of_named) >= dropout_threshold(p)


def uniform(shape: tuple[int, ...], key: int, sample_index: Tensor, position_ids: Tensor | None = None) -> Tensor:
    """Samples of U(0, 1) for the elements of ``[s, b, h]``, in steps of 2^-16, from the random bits of dropout."""
    return (random_bits(shape, key, sample_index, position_ids) + 0.5) / 2**16


def random_bits(
    shape: tuple[int, ...],
    key: int,
    sample_index: Tensor,
    position_ids: Tensor | None = None,
    key_positions: Tensor | None = None,
    first_head: int = 0,
) -> Tensor:
    """The 16 random bits of each element, int64; shapes as in ``ops.bias_dropout_add``."""
    device = sample_index.device
    weights = len(shape) == 4
    length = shape[2 if weights else 0]
    channels = shape[-1]
    position = torch.arange(length, device=device) if position_ids is None else position_ids
    # [b or 1, s, 1], [b, 1, 1]
    position = torch.atleast_2d(position)[..., None]
    sample = sample_index[:, None, None]
    head: Tensor | int = 0
    if weights:
        head = torch.arange(first_head, first_head + shape[1], device=device)[:, None, None] << 16
        position = position[:, None]
        sample = sample[:, None]
    else:
        position = position.transpose(0, 1)
        sample = sample.transpose(0, 1)
    block = torch.arange(-(-channels // 8), device=device) if key_positions is None else key_positions >> 3
    # Block, position and sample broadcast, so the mask of a layer takes one evaluation for 8 elements.
    words = philox((block, position, sample & LOW, (sample >> 32) + head), key)
    halves = torch.stack([half for word in torch.broadcast_tensors(*words) for half in (word & 0xFFFF, word >> 16)], -1)
    if key_positions is None:
        halves = halves.flatten(-2)[..., :channels]
    else:
        halves = halves.take_along_dim((key_positions & 7).view(*[1] * (len(shape) - 1), -1, 1), -1).squeeze(-1)
    return halves


def bias_dropout_add(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    p: float,
    key: int,
    sample_index: Tensor | None,
    position_ids: Tensor | None,
    key_positions: Tensor | None,
    first_head: int,
    *,
    draw: Callable[..., Tensor] = keep,
) -> Tensor:
    """y = residual + keep scale (x + bias); None is not added; shapes as in ``ops.bias_dropout_add``. ``draw`` computes
    the mask."""
    x = x if bias is None else x + bias
    if dropout_threshold(p):
        assert sample_index is not None, "masks are functions of the samples' numbers"
        mask = draw(x.shape, p, key, sample_index, position_ids, key_positions, first_head)
        x = torch.where(mask, x * dropout_scale(p), 0)
    return x if residual is None else residual + x
