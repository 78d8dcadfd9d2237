"""Draws of initial weights on the device that holds them, with the bits of ``initialization.Normal.draw``.

One core draws 18 M elements per second, so 8 B weights of a rank would take 7 minutes. The same operations of IEEE 754
as torch's operators have the same bits: each is a kernel of its own, so no compiler joins a product and a sum.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_core.parallel.boxes import Box
from megatron_core.parallel.initialization import PER_COUNTER

COUNTERS = 2**20
"""Philox counters drawn at a time, so that temporaries take some hundred MB."""
_MULTIPLIERS = 0xD2E7470EE14C6C93, 0xCA5A826395121157
_STEPS = 0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B
"""Constants of Philox 4x64 (Salmon et al. 2011, section 3.3)."""
_LOW = 2**32 - 1


def fill_normal(flat: Tensor, box: Box, shape: tuple[int, ...], seed: int, std: float) -> None:
    """Fill ``flat`` ``[n]`` with the elements of the part ``box`` of a tensor of ``shape``, in row-major order."""
    first = (box.start or (0,))[-1]
    width = (box.shape or (1,))[-1]
    extent = (shape or (1,))[-1]
    # With these sizes each group of elements from a multiple of 8 on has one counter.
    # Otherwise rows begin within a counter, and each element draws its own.
    step = 1 if (first | width | extent) % PER_COUNTER else PER_COUNTER
    for start in range(0, len(flat), COUNTERS * step):
        chunk = flat[start : start + COUNTERS * step]
        indices = _flat_indices(box, shape, torch.arange(start, start + len(chunk), step, device=flat.device))
        words = _philox(torch.div(indices, PER_COUNTER, rounding_mode="floor"), seed)
        if step == PER_COUNTER:
            values = _normal_pairs(torch.stack(words, dim=1)).flatten()
        else:
            draw = indices % PER_COUNTER
            word = torch.stack(words, dim=1).gather(1, (draw // 2).unsqueeze(1))
            values = _normal_pairs(word)[:, 0].gather(1, (draw % 2).unsqueeze(1)).squeeze(1)
        chunk.copy_(values * std)


def _flat_indices(box: Box, shape: Sequence[int], local: Tensor) -> Tensor:
    """The flat indices in a tensor of ``shape`` of the elements ``local`` of its part ``box``."""
    indices = torch.zeros_like(local)
    stride = 1
    for size, start, extent in reversed(list(zip(box.shape, box.start, shape, strict=True))):
        indices += (local % size + start) * stride
        local = torch.div(local, size, rounding_mode="floor")
        stride = stride * extent
    return indices


def _philox(counter: Tensor, key: int) -> tuple[Tensor, ...]:
    """The four 64-bit words of each counter, as numpy's ``Philox(key)``, which begins with the next counter."""
    zero = torch.zeros_like(counter)
    a = counter + 1
    b = zero
    c = zero
    d = zero
    keys = [key, 0]
    for _ in range(10):
        high_a, low_a = _product(a, _MULTIPLIERS[0])
        high_c, low_c = _product(c, _MULTIPLIERS[1])
        a = high_c ^ b ^ _signed(keys[0])
        b = low_c
        c = high_a ^ d ^ _signed(keys[1])
        d = low_a
        keys = [word + increment for word, increment in zip(keys, _STEPS, strict=True)]
    return a, b, c, d


def _product(x: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """The upper and the lower 64 bits of the unsigned product."""
    upper = _upper(x)
    lower = x & _LOW
    high = factor >> 32
    low = factor & _LOW
    across = lower * high
    other = upper * low
    carried = _upper(lower * low) + (across & _LOW) + (other & _LOW)
    return upper * high + _upper(across) + _upper(other) + _upper(carried), x * _signed(factor)


def _upper(x: Tensor) -> Tensor:
    """The upper 32 bits of each word."""
    return (x >> 32) & _LOW


def _signed(word: int) -> int:
    """The int64 with the bits of an unsigned word."""
    return (word + 2**63) % 2**64 - 2**63


def _normal_pairs(words: Tensor) -> Tensor:
    """``initialization._normal_pairs``: ``[...]`` -> ``[..., 2]`` float32."""
    u = (_upper(words).float() + 0.5) * 2.0**-32
    mantissa, exponent = torch.frexp(u)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    log = exponent.float() * 0.6931471805599453
    # The same series, in the same order, as the numpy version: a reordered sum would round differently.
    log = log + 2.0 * s * _polynomial(s * s, (1 / 11, 1 / 9, 1 / 7, 1 / 5, 1 / 3, 1))
    radius = (log * -2.0).clamp_min(0.0).double().sqrt().float()  # libraries round single-precision roots differently
    turns = words & _LOW
    return torch.stack([radius * _cosine(turns), radius * _cosine((turns - 2**30) & _LOW)], dim=-1)


def _cosine(turns: Tensor) -> Tensor:
    distance = (turns.float() * 2.0**-32 - 0.5).abs() - 0.25
    t = distance * 6.283185307179586
    return t * _polynomial(t * t, (-1 / 39916800, 1 / 362880, -1 / 5040, 1 / 120, -1 / 6, 1))


def _polynomial(x: Tensor, coefficients: Sequence[Any]) -> Tensor:
    result = torch.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        result *= x
        result += coefficient
    return result
