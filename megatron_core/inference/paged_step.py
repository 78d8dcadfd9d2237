"""The tokens of a generation step, with keys and values in blocks (Kwon et al. 2023, PagedAttention)."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenChunk:
    """Several consecutive tokens of a text with earlier positions in the cache."""

    row: int
    """Row of its first token in the step."""
    count: int
    table: Tensor
    """``[blocks]``, the blocks of the text up to the chunk's last token."""
    length: int
    """Number of positions up to and including the chunk's last token."""


@dataclass
class PagedStep:
    """Tokens of several texts in one row: single tokens first, then ``chunks``, then chunks from position 0 on."""

    slots: Tensor
    """``[tokens]``, block * block size + offset of each token's keys and values."""
    tables: Tensor
    """``[single tokens, blocks]``, the blocks of their texts, padded."""
    lengths: Tensor
    """``[single tokens]``, the number of positions up to and including each one's own."""
    shortest: int
    longest: int
    """Smallest and largest element of ``lengths``; 0 if there is none."""
    chunks: Sequence[TokenChunk]
    fresh: Sequence[int]
    """Numbers of tokens of the chunks from position 0 on; they attend to the step's own keys and values."""
    texts: Tensor
    """``[texts]``, the number of each text in the memory of states, in the order of the row."""
    _hidden: dict[tuple[int | None, int | None], Tensor | None] = field(default_factory=dict)
    _biases: dict[tuple[int | None, int | None, torch.dtype], Tensor | None] = field(default_factory=dict)

    @classmethod
    def of_nothing(cls) -> "PagedStep":
        """A step without tokens."""
        nothing = torch.empty(0, dtype=torch.int64)
        return cls(nothing, nothing[:, None], nothing, 0, 0, [], [], nothing)

    @property
    def cached(self) -> int:
        """Number of tokens, the first ones of the row, that attend to earlier positions in the cache."""
        return len(self.lengths) + sum(chunk.count for chunk in self.chunks)

    def masked(self, window: int | None, chunk: int | None = None) -> Tensor | None:
        """Mask for single tokens ``[n, 1, 1, positions]``, True for keys after the query or before its last ``window``.

        It is also True for keys in earlier chunks of ``chunk`` tokens. None if every single token attends to all keys
        of the longest text.
        """
        if (window, chunk) not in self._hidden:
            hidden = None
            limits = [limit for limit in (window, chunk) if limit is not None]
            if self.shortest < self.longest or any(limit < self.longest for limit in limits):
                position = self.lengths[:, None, None, None]
                keys = torch.arange(self.longest, device=self.tables.device)
                hidden = keys >= position
                hidden = hidden if window is None else hidden | (keys < position - window)
                hidden = hidden if chunk is None else hidden | (keys < (position - 1) // chunk * chunk)
            self._hidden[window, chunk] = hidden
        return self._hidden[window, chunk]

    def bias(self, window: int | None, dtype: torch.dtype, chunk: int | None = None) -> Tensor | None:
        """``masked`` as an additive bias of the attention scores: -inf for masked keys, otherwise 0."""
        hidden = self.masked(window, chunk)
        if hidden is None:
            return None
        if (window, chunk, dtype) not in self._biases:
            zeros = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            self._biases[window, chunk, dtype] = zeros.masked_fill_(hidden, -torch.inf)
        return self._biases[window, chunk, dtype]

    @staticmethod
    def gathered(memory: Tensor, table: Tensor, length: int) -> Tensor:
        """Copy the first ``length`` positions of texts with the blocks ``table`` ``[..., blocks]``.

        Returns ``[..., length, heads, d]``.
        """
        dim = table.dim() - 1
        return memory[table].flatten(dim, dim + 1).narrow(dim, 0, length)
