"""What every layer needs to know about the micro-batch that passes through it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class KeyValueStore(Protocol):
    """Keys and values of earlier positions, for generation."""

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store ``[s, b, groups, d]`` of the new positions and return those of all positions so far."""
        ...


@dataclass(frozen=True)
class SequenceContext:
    """Positions, mask and identity of the sequences in a micro-batch."""

    rotary: tuple[Tensor, Tensor] | None = None
    """Cosine and sine ``[s, 1, 1, r]`` of the rotary positions."""
    attention_mask: Tensor | None = None
    """``[b, 1, s, s]``, True where a query must not see a key; None: causal."""
    sample_index: Tensor | None = None
    """``[b]``, the global number of each sequence, which keys its dropout."""
    cache: KeyValueStore | None = None
    """Where keys and values of earlier positions are, in generation."""
