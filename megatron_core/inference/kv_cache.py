"""Cache of keys and values, for sequences of different lengths in one batch."""

from collections.abc import Sequence

import torch
from torch import Tensor

STEP = 256
"""Minimum growth in positions, so that short sequences are never copied."""


class KVCache:
    """Keys and values of each layer of this rank, ``[sequences, heads, positions, channels]``.

    ``lengths``: the number of stored positions of each sequence. A step adds either whole prompts as new sequences
    (``begin_prompts``) or one token to every sequence (``begin_tokens``), followed by the model's forward and ``end``.
    Full memory grows by half. Values after the end of a sequence are finite and masked.
    """

    def __init__(self, device: torch.device) -> None:
        self.lengths: list[int] = []
        self._device = device
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._hidden: dict[int | None, Tensor] = {}
        self._biases: dict[tuple[int | None, torch.dtype], Tensor] = {}

    @torch.inference_mode()
    def remove(self, sequence: int) -> None:
        """Remove a sequence; the last sequence gets its number."""
        last = len(self.lengths) - 1
        for stored in (tensor for pair in self._layers.values() for tensor in pair if sequence != last):
            positions = stored.movedim(-2, 1)[:, : self.lengths[last]]
            positions[sequence] = positions[last]
        self.lengths[sequence] = self.lengths[last]
        self.lengths.pop()

    def begin_prompts(self, counts: Sequence[int]) -> Tensor:
        """Begin a step of new sequences with ``counts`` tokens, concatenated into one row.

        Returns their positions ``[1, sum of counts]``.
        """
        first, self._after = len(self.lengths), [*self.lengths, *counts]
        self._packed, self._ragged = True, False
        positions = torch.cat([torch.arange(count) for count in counts])
        rows = torch.arange(first, first + len(counts)).repeat_interleave(torch.tensor(counts))
        # Indices come from the host: a mask would synchronize with the GPU in every layer.
        self._at = rows.to(self._device), positions.to(self._device)
        return self._at[1][None]

    def begin_tokens(self) -> Tensor:
        """Begin a step of one token for every sequence; return their positions ``[sequences, 1]``."""
        self._after = [length + 1 for length in self.lengths]
        self._packed, self._ragged = False, len(set(self.lengths)) > 1
        self._hidden.clear()
        self._biases.clear()
        own = torch.tensor(self.lengths, device=self._device)
        self._at = torch.arange(len(self.lengths), device=self._device), own
        return own[:, None]

    def end(self) -> None:
        """Add the step's tokens to the lengths, after all layers have stored them."""
        self.lengths = self._after

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values ``[s, b, ...]`` of a layer; return all positions of the sequences ``[t, b, ...]``.

        Prompts have no earlier positions: the same tensors are returned.
        """
        longest = max(self._after)
        stored = self._layers.get(layer)
        if stored is None or stored[0].shape[0] < len(self._after) or stored[0].shape[-2] < longest:
            olds = (None, None) if stored is None else stored
            self._layers[layer] = stored = (self._grown(olds[0], key), self._grown(olds[1], value))
        found = []
        for memory, new in zip(stored, (key, value), strict=True):
            positions = memory.movedim(-2, 1)  # [sequences, positions, ...]
            positions[self._at] = new.flatten(0, 1)
            found.append(positions[: len(self._after), :longest].transpose(0, 1))
        return (key, value) if self._packed else (found[0], found[1])

    def masked(self, window: int | None) -> Tensor | None:
        """Mask ``[b, 1, 1, positions]``, True for keys after the query or before its last ``window`` positions.

        None for prompts, and if all sequences have the same length.
        """
        if not self._ragged:
            return None
        if window not in self._hidden:
            keys, own = torch.arange(max(self._after), device=self._device), self._at[1][:, None, None, None]
            hidden = keys > own
            self._hidden[window] = hidden if window is None else hidden | (keys <= own - window)
        return self._hidden[window]

    def bias(self, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """``masked`` as an additive bias of the attention scores: -inf for masked keys, otherwise 0."""
        hidden = self.masked(window)
        if hidden is None:
            return None
        if (window, dtype) not in self._biases:
            zeros = torch.zeros(hidden.shape, dtype=dtype, device=self._device)
            self._biases[window, dtype] = zeros.masked_fill_(hidden, -torch.inf)
        return self._biases[window, dtype]

    def _grown(self, old: Tensor | None, like: Tensor) -> Tensor:
        """Allocate memory for the step, and copy ``old`` into it."""
        held = (0, 0) if old is None else (old.shape[0], old.shape[-2])
        # Growing by half limits copying to a constant number of copies per token.
        wanted = (len(self._after), -(-max(self._after) // STEP) * STEP)
        room = [size if size >= need else max(need, size * 3 // 2) for size, need in zip(held, wanted, strict=True)]
        memory = like.new_zeros(room[0], *like.shape[2:-1], room[1], like.shape[-1])
        if old is not None:
            memory[: held[0], ..., : held[1], :] = old
        return memory
