"""Random numbers of dropout and of the router's jitter, as functions of their place, with Python integers."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

WORD = 2**32 - 1


def philox(counter: tuple[int, int, int, int], key: int) -> tuple[int, int, int, int]:
    """Philox 4x32 with 10 rounds (Salmon et al. 2011, section 3.3 and table 2)."""
    a, b, c, d = counter
    low, high = key & WORD, key >> 32
    for _ in range(10):
        first, second = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (second >> 32) ^ b ^ low, second & WORD, (first >> 32) ^ d ^ high, first & WORD
        low, high = (low + 0x9E3779B9) & WORD, (high + 0xBB67AE85) & WORD
    return a, b, c, d


def key_of(seed: int, name: str) -> int:
    """The key of a mask: 63 bits of SHA-256 of "seed:name"."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "little") >> 1


def bits(key: int, samples: list[int], length: int, channels: int, head: int = 0) -> Tensor:
    """16 random bits of each element ``[b, t, channels]`` of sequences with these numbers in the data.

    A counter (channels / 8, position, low word of the sample, high word of the sample + head 2^16) gives 8 of them.
    """
    rows = []
    for sample in samples:
        for position in range(length):
            row: list[int] = []
            for block in range(-(-channels // 8)):
                words = philox((block, position, sample & WORD, (sample >> 32) + (head << 16)), key)
                row += [half for word in words for half in (word & 0xFFFF, word >> 16)]
            rows.append(row[:channels])
    return torch.tensor(rows, dtype=torch.int64).view(len(samples), length, channels)


def dropped(x: Tensor, p: float, seed: int, name: str, samples: list[int], head: int = 0) -> Tensor:
    """x times 0 or 1 / (1 - p) (Srivastava et al. 2014, section 10); p is rounded to a multiple of 2^-16."""
    threshold = round(p * 2**16)
    if not threshold:
        return x
    kept = bits(key_of(seed, f"dropout:{name}"), samples, x.shape[1], x.shape[2], head) >= threshold
    return x * kept / (1 - threshold / 2**16)


def uniform(shape: torch.Size, seed: int, name: str, samples: list[int]) -> Tensor:
    """Samples of U(0, 1) for ``[b, t, channels]``."""
    return (bits(key_of(seed, name), samples, shape[1], shape[2]).double() + 0.5) / 2**16
