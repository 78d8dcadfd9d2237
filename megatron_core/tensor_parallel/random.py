"""Dropout whose mask is a pure function of what it falls on, and of nothing else.

The mask of an element is a hash of (seed, place in the model, sample, position, channel). No generator is read, so
the layout, the number of micro-batches, recomputation and a resume cannot change it, and nothing has to be saved.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_core.errors import ConfigError
from megatron_core.parallel.sharding import name_seed

# Constants of splitmix64 (Steele, Lea and Flood 2014), as signed 64-bit integers.
_GAMMA = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64
_BITS = 24


def _shift_right(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix(x: Tensor) -> Tensor:
    """The finaliser of splitmix64, elementwise on int64; products wrap around."""
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


class KeyedDropout(torch.nn.Module):
    """x -> x * keep / (1 - p), where keep is a hash of the coordinates of each element.

    ``place`` names the dropout in the model (as ``layers.3.attention``), ``p`` is the probability to drop.
    """

    def __init__(self, p: float, seed: int, place: str) -> None:
        super().__init__()
        self.p = p
        self.key = name_seed(seed, f"dropout:{place}")

    @property
    def active(self) -> bool:
        """Whether anything is dropped: in training, with p above 0."""
        return self.training and self.p > 0.0

    def forward(self, x: Tensor, coordinates: tuple[Tensor | None, ...]) -> Tensor:
        """Drop elements of ``x``; ``coordinates`` are integer tensors that broadcast to its shape."""
        if not self.active:
            return x
        if any(c is None for c in coordinates):
            raise ConfigError("dropout above 0 needs sample_index: pass the batch's global sample numbers to forward")
        return x * (self.keep(coordinates).to(x.dtype) * (1.0 / (1.0 - self.p)))

    def keep(self, coordinates: tuple[Tensor, ...]) -> Tensor:
        """True where an element stays."""
        state = torch.full((), self.key, dtype=torch.int64, device=coordinates[0].device)
        for coordinate in coordinates:
            state = mix((state + coordinate + 1) * _GAMMA)
        return (state & (2**_BITS - 1)) >= int(self.p * 2**_BITS)
