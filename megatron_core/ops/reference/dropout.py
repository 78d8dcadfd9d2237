"""Dropout whose mask is a function of what it falls on, and Philox, which draws it.

An element belongs to a sample (the global number of its sequence, below 2^48), to a position in the whole sequence, in
attention weights to a head (0 elsewhere), and to a channel, the last dim, which in attention weights is the key's
position. The four words of 32 bits

    philox(counter = (channel / 8, position, sample mod 2^32, sample / 2^32 + 2^16 head), key)

have 16 bits for each of eight neighbouring channels, the lower ones of a word first; the key is that of the seed and of
the module's name. An element is dropped where its bits are below 2^16 p, rounded to a whole number, and what stays
is divided by the share that really stays. So no layout changes the mask, and no generator is read. The native kernels
draw the same bits (csrc/common/dropout.h); 32 bits an element would double what they compute.
"""

from __future__ import annotations

import torch
from torch import Tensor

LOW = 2**32 - 1
"""The lower 32 bits."""

_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four random words for each counter: Philox 4x32 with 10 rounds (Salmon et al. 2011, section 3.3).

    Words are int64 tensors that hold 32 bits and broadcast; ``key`` has 64 bits.
    """
    a, b, c, d = counter
    low, high = key & LOW, key >> 32
    for _ in range(_ROUNDS):
        (a_high, a_low), (c_high, c_low) = (_product(x, m) for x, m in zip((a, c), _MULTIPLIERS, strict=True))
        a, b, c, d = c_high ^ b ^ low, c_low, a_high ^ d ^ high, a_low
        low, high = ((k + step) & LOW for k, step in zip((low, high), _KEY_STEPS, strict=True))
    return a, b, c, d


def _product(x: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """The upper and the lower 32 bits of x m; that the int64 product may be negative changes neither."""
    product = x * m
    return (product >> 32) & LOW, product & LOW


def threshold(p: float) -> int:
    """What the 16 bits of dropped elements are below."""
    return min(round(p * 2**16), 2**16 - 1)


def scale(p: float) -> float:
    """One divided by the share of elements that stays."""
    return 1 / (1 - threshold(p) / 2**16)


def keep(
    shape: tuple[int, ...],
    p: float,
    key: int,
    sample_index: Tensor,
    position_ids: Tensor | None = None,
    key_positions: Tensor | None = None,
    first_head: int = 0,
) -> Tensor:
    """True where an element of ``[s, b, h]``, or of attention weights ``[b, heads, s, t]``, stays."""
    return bits(shape, key, sample_index, position_ids, key_positions, first_head) >= threshold(p)


def uniform(shape: tuple[int, ...], key: int, sample_index: Tensor, position_ids: Tensor | None = None) -> Tensor:
    """Numbers of U(0, 1) for the elements of ``[s, b, h]``, in steps of 2^-16, by the bits that dropout would draw."""
    return (bits(shape, key, sample_index, position_ids) + 0.5) / 2**16


def bits(
    shape: tuple[int, ...],
    key: int,
    sample_index: Tensor,
    position_ids: Tensor | None = None,
    key_positions: Tensor | None = None,
    first_head: int = 0,
) -> Tensor:
    """The 16 bits of each element, int64; shapes as in ``keep``."""
    device, weights = sample_index.device, len(shape) == 4
    length, channels = shape[2 if weights else 0], shape[-1]
    position = torch.arange(length, device=device) if position_ids is None else position_ids
    position, sample = torch.atleast_2d(position)[..., None], sample_index[:, None, None]  # [b or 1, s, 1], [b, 1, 1]
    head: Tensor | int = 0
    if weights:
        head = torch.arange(first_head, first_head + shape[1], device=device)[:, None, None] << 16
        position, sample = position[:, None], sample[:, None]
    else:
        position, sample = position.transpose(0, 1), sample.transpose(0, 1)
    block = torch.arange(-(-channels // 8), device=device) if key_positions is None else key_positions >> 3
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
) -> Tensor:
    """y = residual + keep scale (x + bias); what is absent is not added, shapes as in ``ops.bias_dropout_add``."""
    x = x if bias is None else x + bias
    if threshold(p):
        assert sample_index is not None, "masks are functions of the samples' numbers"
        kept = keep(x.shape, p, key, sample_index, position_ids, key_positions, first_head)
        x = torch.where(kept, x * scale(p), 0)
    return x if residual is None else residual + x
