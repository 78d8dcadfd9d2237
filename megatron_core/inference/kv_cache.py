"""Keys and values of earlier positions, for sequences of different lengths that are generated together."""

from collections.abc import Sequence

import torch
from torch import Tensor

STEP = 64
"""Positions by which the memory grows at least, so that it is not moved for every token."""


class KVCache:
    """For each layer of this rank keys and values ``[positions, sequences, ...]``; ``lengths`` says how many of each.

    A step appends tokens to sequences with neighbouring numbers: ``begin``, the model's forward, ``end``. Memory grows
    by half when it is full. What lies behind a sequence's length is finite and never seen.
    """

    def __init__(self, device: torch.device) -> None:
        self.lengths: list[int] = []
        self._device = device
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._masks: dict[int | None, Tensor] = {}

    def remove(self, sequence: int) -> None:
        """Forget a sequence; the last one takes its number."""
        last = len(self.lengths) - 1
        for stored in (tensor for pair in self._layers.values() for tensor in pair if sequence != last):
            stored[: self.lengths[last], sequence] = stored[: self.lengths[last], last]
        self.lengths[sequence] = self.lengths[last]
        self.lengths.pop()

    def begin(self, first: int, counts: Sequence[int]) -> Tensor:
        """Announce ``counts[i]`` new tokens of sequence ``first + i``, which is a new one if it is not there yet.

        -> the positions ``[b, s]`` of the tokens, s the largest count; those of padding, which stands behind a row's
        tokens and is not stored, are the position of the last token.
        """
        self.lengths += [0] * (first + len(counts) - len(self.lengths))
        before = self.lengths[first : first + len(counts)]
        self._counts, self._first = list(counts), first
        self._total = max(old + new for old, new in zip(before, counts, strict=True))
        self._ragged = len(set(before)) > 1 or len(set(counts)) > 1
        self._masks.clear()
        start = torch.tensor(before, device=self._device)[:, None]
        offset = torch.arange(max(counts), device=self._device)
        count = torch.tensor(self._counts, device=self._device)[:, None]
        self._positions = start + torch.minimum(offset, count - 1)
        # Where in [s, b], as the keys are, a token is, and where it is stored: numbers from the host, as a mask's would
        # be waited for on a GPU, in every layer.
        tokens = torch.arange(max(counts))[:, None] < torch.tensor(self._counts)
        step, row = (each.to(self._device) for each in tokens.nonzero(as_tuple=True))
        self._kept, self._stored_at = (step, row), (self._positions[row, step], row + first)
        return self._positions

    def end(self) -> None:
        """Add the tokens of the step to the lengths, after all layers have stored them."""
        for i, count in enumerate(self._counts):
            self.lengths[self._first + i] += count

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store the step's ``[s, b, ...]`` of a layer and return all positions of its sequences so far."""
        stored = self._layers.get(layer)
        if stored is None or stored[0].shape[0] < self._total or stored[0].shape[1] < len(self.lengths):
            old_key, old_value = (None, None) if stored is None else stored
            self._layers[layer] = stored = (self._grown(old_key, key), self._grown(old_value, value))
        for memory, new in zip(stored, (key, value), strict=True):
            memory[self._stored_at] = new[self._kept]
        rows = slice(self._first, self._first + len(self._counts))
        return stored[0][: self._total, rows], stored[1][: self._total, rows]

    def masked(self, window: int | None) -> Tensor | None:
        """``[b, 1, s, positions]``, True for keys that a query does not see: those behind its own and those before the
        last ``window``. None where all rows have as many tokens, before the step and in it: the last query's own key is
        then the last one."""
        if not self._ragged:
            return None
        if window not in self._masks:
            keys, own = torch.arange(self._total, device=self._device), self._positions[:, None, :, None]
            hidden = keys > own
            self._masks[window] = hidden if window is None else hidden | (keys <= own - window)
        return self._masks[window]

    def _grown(self, old: Tensor | None, like: Tensor) -> Tensor:
        """Memory with room for the step, and what ``old`` held."""
        held = (0, 0) if old is None else old.shape[:2]
        # Half as much again, so that moving costs a constant number of copies for each token.
        wanted = (-(-self._total // STEP) * STEP, len(self.lengths))
        room = [size if size >= need else max(need, size * 3 // 2) for size, need in zip(held, wanted, strict=True)]
        memory = like.new_zeros(*room, *like.shape[2:])
        if old is not None:
            memory[: held[0], : held[1]] = old
        return memory
