"""Hashes of tensors' bits, computed where the tensors are.

A tensor is a row x of signed 32-bit words (16 or 8 bits for narrower elements, two words for a wider one), and
h = sum of x_i w_i modulo 2^64, where the w_i are fixed random odd numbers. Tensors whose bits differ, also those
in which two elements are exchanged, have the same sum with a probability of at most 2^-32, because each difference of
words is below 2^32. NaN is a pattern of bits like any other.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

# Words that are widened to 64 bits at a time: 2 MiB, the fastest of 2^14 to 2^20 on a CPU.
CHUNK = 2**18
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


def hash_tensors(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """A 64-bit hash of each tensor, ``[n]`` int64; the same on every rank and device for the same bits."""
    random = torch.Generator().manual_seed(1)
    factors = torch.randint(-(2**63), 2**63 - 1, (CHUNK,), generator=random).to(device) | 1
    hashes = [_hash(tensor.detach(), factors) for tensor in tensors]
    return torch.stack(hashes) if hashes else torch.zeros(0, dtype=torch.int64, device=device)


def _hash(tensor: Tensor, factors: Tensor) -> Tensor:
    """Each chunk has the same factors; several chunks' hashes are hashed again, so that their order counts."""
    words = tensor.reshape(-1).view(_WORDS[tensor.element_size()])
    sums = [(chunk.to(torch.int64).mul_(factors[: chunk.numel()])).sum() for chunk in words.split(CHUNK)]
    return sums[0] if len(sums) == 1 else _hash(torch.stack(sums), factors)
