"""What every layer needs to know about the micro-batch that passes through it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from megatron_core.errors import DataError


class KeyValueStore(Protocol):
    """Keys and values of earlier positions, for generation."""

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store ``[s, b, groups, d]`` of the new positions and return those of all positions so far."""
        ...


@dataclass(frozen=True)
class PackedDocuments:
    """Where the documents of each sequence lie; no token sees another document than its own.

    The lengths are known on the host, so that the attention of one document after the other waits for no device.
    """

    lengths: tuple[tuple[int, ...], ...]
    """Of each sequence its documents' lengths in tokens, in their order."""
    device: torch.device
    """Where ``masked`` is made."""

    @classmethod
    def of(cls, lengths: Sequence[Sequence[int]], batch: int, length: int, device: torch.device) -> PackedDocuments:
        """The documents of ``batch`` sequences of ``length`` tokens; DataError where they do not fill them."""
        if len(lengths) != batch:
            raise DataError(f"document_lengths are those of {len(lengths)} sequences, and the batch has {batch}")
        for number, own in enumerate(lengths):
            if sum(own) != length or min(own, default=0) < 1:
                raise DataError(f"document_lengths[{number}]={list(own)} must be above 0 and add up to {length} tokens")
        return cls(tuple(tuple(own) for own in lengths), device)

    @cached_property
    def masked(self) -> Tensor:
        """``[b, 1, s, s]``, False where a query sees a key: in its own document, at its place or before it.

        Made at the first use and kept, once for all layers of the micro-batch.
        """
        blocks = [torch.block_diag(*(torch.ones(n, n, dtype=torch.bool) for n in own)) for own in self.lengths]
        return ~torch.stack(blocks).tril().unsqueeze(1).to(self.device, non_blocking=True)


@dataclass(frozen=True)
class SequenceContext:
    """Positions, mask and identity of the sequences in a micro-batch."""

    rotary: tuple[Tensor, Tensor] | None = None
    """Cosine and sine of the rotary positions, ``[s, b, r/2]``, or ``[s, 1, r/2]`` where all sequences have the
    same."""
    attention_mask: Tensor | None = None
    """``[b, 1, s, s]``, True where a query must not see a key; None: causal."""
    documents: PackedDocuments | None = None
    """The documents of each sequence, which see nothing of one another; None: each sequence is one document."""
    sample_index: Tensor | None = None
    """``[b]``, the global number of each sequence, which keys its dropout."""
    cache: KeyValueStore | None = None
    """Where keys and values of earlier positions are, in generation."""
