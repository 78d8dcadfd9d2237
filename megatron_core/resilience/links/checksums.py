"""Checksums of tensors: an exact hash of their bits, and sums of blocks that are linear in the elements.

A hash compares moved data. The bits of a reduction are new, so its sums are compared: for
a block of elements and fixed signs s_i = +1 or -1, the sum over i of s_i x_i is linear. Therefore the sum over the
ranks of the inputs' block sums is the block sum of the result, up to rounding.

Bound on the rounding: with unit roundoff u, a sum of n ranks has in element i an error e_i of at most (n - 1) u a_i,
where a_i is the sum over the ranks of |x_i|. For random signs, P(|sum of s_i e_i| > t ||e||) <= 2 exp(-t^2 / 2)
(Hoeffding 1963), and ||a|| is at most the sum over the ranks of the blocks' norms. With t = 8 the probability of a
false alarm is below 3e-14 for each block.
"""

from functools import cache

import torch
from torch import Tensor

CONFIDENCE = 8.0
"""t in the bound on the rounding."""
_CHUNK = 2**18
_SIXTEEN_BITS = (torch.bfloat16, torch.float16)


def block_length(dtype: torch.dtype) -> int:
    """Elements of a block: fewer where rounding is coarse, so that a changed element exceeds the bound."""
    return 64 if dtype in _SIXTEEN_BITS else 1024


def block_sums(x: Tensor, count: int) -> Tensor:
    """Signed sums and norms of the blocks of each of ``count`` equal parts of ``x``: ``[count, blocks, 2]``.

    float64 for floating-point numbers. Integers are summed in int64 modulo 2^64, and their norms are 0.
    """
    rows = x.detach().reshape(count, -1)
    length = block_length(x.dtype)
    full = rows.shape[1] // length * length
    pieces = [_sums(rows[:, :full].unflatten(1, (-1, length)))] if full else []
    if full < rows.shape[1] or not pieces:
        pieces.append(_sums(rows[:, full:].unsqueeze(1)))
    return torch.cat(pieces, 1)


def _sums(blocks: Tensor) -> Tensor:
    """Signed sums and norms of ``blocks`` ``[parts, n, length]``."""
    wide = torch.int64
    if blocks.is_floating_point():
        wide = torch.float32 if blocks.dtype in _SIXTEEN_BITS else torch.float64
    signs = _signs(blocks.shape[2], blocks.device).to(wide)
    size = max(_CHUNK // (blocks.shape[0] * max(blocks.shape[2], 1)), 1)
    return torch.cat([_chunk_sums(chunk.to(wide), signs) for chunk in blocks.split(size, 1)], 1)


def _chunk_sums(blocks: Tensor, signs: Tensor) -> Tensor:
    if not blocks.is_floating_point():
        sums = (blocks * signs).sum(2)
        return torch.stack([sums, torch.zeros_like(sums)], 2)
    return torch.stack([blocks @ signs, torch.linalg.vector_norm(blocks, dim=2)], 2).to(torch.float64)


@cache
def _signs(length: int, device: torch.device) -> Tensor:
    random = torch.Generator().manual_seed(length)
    return (2 * torch.randint(0, 2, (length,), generator=random) - 1).to(device)


def maxima(x: Tensor, count: int) -> Tensor:
    """The maximum of each of ``count`` equal parts of ``x`` without its NaNs, and 1 if there are NaNs, else 0:
    ``[count, 2]``."""
    rows = x.detach().reshape(count, -1)
    lost = rows.isnan()
    numbers = rows.masked_fill(lost, -torch.inf) if x.is_floating_point() else rows
    return torch.stack([numbers.amax(1), lost.any(1).to(x.dtype)], 1)


def maximum_differs(result: Tensor, expected: Tensor) -> bool:
    """Whether ``maxima`` of a result differ from the greatest ones of the inputs, both ``[2]``.

    A maximum of inputs with NaNs may be any of them: gloo drops or keeps a NaN depending on the order of the ranks.
    """
    return not bool(expected[1]) and not torch.equal(result, expected)


def differs(result: Tensor, expected: Tensor, dtype: torch.dtype, ranks: int) -> Tensor:
    """Whether block sums ``result`` ``[..., 2]`` of a reduced ``dtype`` differ from the ``expected`` ones by more than
    the rounding of a sum over ``ranks``: ``[...]`` bool."""
    if not result.is_floating_point():
        return result[..., 0] != expected[..., 0]
    info, length = torch.finfo(dtype), block_length(dtype)
    wide = torch.finfo(torch.float32 if dtype in _SIXTEEN_BITS else torch.float64)
    per_norm = (ranks - 1) * info.eps / 2 + length * wide.eps / 2
    bound = CONFIDENCE * per_norm * expected[..., 1] + ranks * length * info.tiny
    wrong = ~((result[..., 0] - expected[..., 0]).abs() <= bound)
    # A sum that is not finite, or may overflow, has no bound; a NaN that appears in a harmless sum is an error.
    return wrong & expected.isfinite().all(-1) & (expected[..., 1] < info.max / 4)
