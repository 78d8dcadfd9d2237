"""Sums that are exact, so that their bits depend neither on the order nor on the grouping of the addends.

Each addend is rounded to a multiple of ``UNIT`` in float64. Sums of such numbers are exact as long as their magnitudes
stay below ``RANGE`` = 2^53 units; a limit on the magnitude of each addend guarantees that. An addend beyond the limit
becomes nan, which makes the step a skipped one in every layout.
Source: Demmel and Nguyen 2015, "Parallel Reproducible Summation" (pre-rounded addends), with one fixed bin.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

UNIT = 2.0**-44
"""Distance between neighbouring addends of a gradient: half of it, 2.8e-14, is the error of each addend."""
RANGE = 2.0**53 * UNIT
"""Magnitude (512) up to which sums of multiples of ``UNIT`` are exact in float64."""
LOSS_UNIT = 2.0**-24
"""As ``UNIT``, for losses of tokens: below the rounding error of a float32 loss above 1."""

BALANCING_UNIT = 2.0**-32
"""As ``UNIT``, for the tokens' terms of a load balancing loss, whose sum over a sequence is about 1."""

_SQUARE_BITS = 62
_WORD_BITS = 31


def rounded_exactly(x: Tensor, terms: int, unit: float = UNIT) -> Tensor:
    """``x`` in float64, rounded to multiples of ``unit``, for a sum of at most ``terms`` addends over all ranks.

    An addend above ``largest_addend`` becomes nan.
    """
    shift = 1.5 * 2.0**52 * unit
    limit = largest_addend(terms, unit)
    # Numbers near the shift have a distance of ``unit``, so that adding it rounds.
    rounded = x.to(torch.float64, copy=True).add_(shift).sub_(shift)
    if x.is_cpu and x.numel():  # one pass over the addends instead of three over wider ones
        lowest, highest = x.aminmax()
        if -limit <= float(lowest) and float(highest) <= limit:
            return rounded
    return rounded.masked_fill_(~(x.abs() <= limit), torch.nan)


def largest_addend(terms: int, unit: float = UNIT) -> float:
    """The largest magnitude of each of ``terms`` addends: 2^53 units / ``terms``, at most 2^51 units."""
    return min(2.0**53 / terms, 2.0**51) * unit


def add_exactly_(total: Tensor, x: Tensor, terms: int) -> None:
    """total += x, exactly; ``total`` is float64 and has the shape of ``x``; see ``rounded_exactly`` for ``terms``."""
    total.add_(rounded_exactly(x, terms))


def add_rows_exactly_(total: Tensor, rows: Tensor, terms: int) -> None:
    """total_n += sum of the rows of ``rows`` ``[..., n]``, exactly; ``total`` ``[n]`` is float64."""
    total.add_(rounded_exactly(rows.reshape(-1, rows.shape[-1]), terms).sum(0))


def exact_loss_sum(losses: Tensor, tokens: int, unit: float = LOSS_UNIT) -> Tensor:
    """The exact sum of the losses of tokens, a float64 scalar; at most ``tokens`` losses add up over all ranks."""
    return _LossSum.apply(losses, tokens, unit)


class _LossSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, losses, tokens, unit):
        ctx.shape = losses.shape
        ctx.dtype = losses.dtype
        return rounded_exactly(losses.detach(), tokens, unit).sum()

    @staticmethod
    def backward(ctx, grad):
        return grad.to(ctx.dtype).expand(ctx.shape), None, None


def scale_gradient(x: Tensor, factor: Tensor) -> Tensor:
    """``x`` itself; its gradient is multiplied by ``factor``."""
    return _ScaleGradient.apply(x, factor)


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


def exact_squares(tensors: Sequence[Tensor], largest: float) -> Tensor:
    """The sum of (x / ``largest``)^2 over all elements as two integers ``[2]`` (int64), which add up over ranks.

    ``largest``: a power of two, at least the magnitude of every element. A square is rounded to a multiple of 2^-62;
    the integers are the sums of its upper and lower 31 bits, exact for up to 2^31 elements. See ``sum_of_squares``.
    """
    device = tensors[0].device if tensors else None
    words = torch.zeros(2, dtype=torch.int64, device=device)
    for tensor in tensors:
        for piece in tensor.reshape(-1).split(1 << 16):  # in the cache: 6 passes
            square = (piece.to(torch.float64) / largest).square_().mul_(2.0**_SQUARE_BITS).round_().to(torch.int64)
            words[0] += (square >> _WORD_BITS).sum()
            words[1] += (square & ((1 << _WORD_BITS) - 1)).sum()
    return words


def sum_of_squares(words: Tensor, largest: float) -> Tensor:
    """The sum whose integers ``exact_squares`` has computed, a float64 scalar."""
    upper, lower = words.to(torch.float64).unbind()
    return (upper * 2.0**_WORD_BITS + lower) * 2.0**-_SQUARE_BITS * largest**2
