"""Keys and values of earlier positions, for generation token by token."""

from __future__ import annotations

from torch import Tensor


class KVCache:
    """For each layer of this rank, keys and values ``[max_length, b, groups, d]``, valid up to ``length``."""

    def __init__(self, max_length: int) -> None:
        self.max_length = max_length
        self.length = 0
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store new positions ``[s, b, groups, d]`` of a layer and return those of all positions so far."""
        if layer not in self._layers:
            shape = (self.max_length, *key.shape[1:])
            self._layers[layer] = (key.new_empty(shape), value.new_empty(shape))
        stop = self.length + key.shape[0]
        for stored, new in zip(self._layers[layer], (key, value), strict=True):
            stored[self.length : stop] = new
        keys, values = self._layers[layer]
        return keys[:stop], values[:stop]

    def advance(self, positions: int) -> None:
        """Add ``positions`` to the length, after all layers have stored them."""
        self.length += positions
