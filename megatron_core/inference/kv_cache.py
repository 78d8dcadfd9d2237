"""Memory of keys and values in blocks, which the texts of a step use through tables of block numbers, and of states."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_core.inference.paged_attention import attend_cached, attend_fresh
from megatron_core.inference.paged_step import PagedStep, TokenChunk


@dataclass(frozen=True)
class CachedSpan:
    """Consecutive positions of a text that a step computes, and the blocks of all its positions."""

    first: int
    """First position; the earlier ones are in the cache."""
    count: int
    table: Sequence[int]
    text: int = 0
    """Number of the text in the memory of states."""


class KVCache:
    """Keys and values of each layer of this rank, ``[blocks, positions of a block, heads, channels]``, and the states
    of up to ``texts`` texts in recurrent layers.

    A step is ``begin``, followed by the model's forward, which calls ``write`` in every layer before its attention.
    """

    def __init__(self, device: torch.device, block_size: int, capacity: int, texts: int = 1) -> None:
        self.block_size = block_size
        self.capacity = capacity
        self.texts = texts
        self.blocks = 0
        """Number of blocks for which memory is allocated."""
        self.step = PagedStep.of_nothing()
        self._device = device
        self._layers: dict[int, tuple[Tensor, ...]] = {}
        self._states: dict[int, tuple[Tensor, ...]] = {}

    @property
    def bytes(self) -> int:
        """Allocated memory."""
        layers = (*self._layers.values(), *self._states.values())
        return sum(memory.nbytes for layer in layers for memory in layer)

    def attend(self, layer: Any, query: Tensor, key: Tensor, value: Tensor, *sinks: Tensor) -> Tensor:
        """Store keys and values ``[tokens, heads, d]`` of the step's tokens; return the layer's attention."""
        keys, values = self.write(layer.layer_number, key, value)
        cached = self.step.cached
        outputs = []
        if cached:
            outputs.append(self.attend_cached(layer.core_attention, query[:cached], keys, values, *sinks))
        if self.step.fresh:
            fresh = (tensor[cached:] for tensor in (query, key, value))
            outputs.append(self.attend_fresh(layer.core_attention, *fresh, *sinks))
        return torch.cat(outputs)

    def attend_cached(self, core: Any, query: Tensor, keys: Tensor, values: Tensor, *sinks: Tensor) -> Tensor:
        """Attention of the tokens with earlier positions, ``[tokens, heads, d]``, over the memory of a layer."""
        attend: Callable[..., Tensor] = getattr(core, "attend_cached", partial(attend_cached, core))
        return attend(query, keys, values, self.step, *sinks)

    def attend_fresh(self, core: Any, query: Tensor, key: Tensor, value: Tensor, *sinks: Tensor) -> Tensor:
        """Attention of the tokens of new texts, ``[tokens, heads, d]``, over these tokens."""
        attend: Callable[..., Tensor] = getattr(core, "attend_fresh", partial(attend_fresh, core))
        return attend(query, key, value, self.step, *sinks)

    def begin(self, spans: Sequence[CachedSpan]) -> Tensor:
        """Begin a step of ``spans``, concatenated into one row; return their positions ``[1, sum of counts]``.

        First come single tokens, then chunks with earlier positions, then chunks from position 0 on.
        """
        singles = [span for span in spans if span.count == 1]
        chunks = [span for span in spans if span.count > 1 and span.first]
        fresh = [span for span in spans if span.count > 1 and not span.first]
        assert [*singles, *chunks, *fresh] == list(spans), "spans are in the order of the row"
        size = self.block_size
        device = self._device
        # Indices come from the host: a mask would synchronize with the GPU in every layer.
        positions = [torch.tensor([span.first for span in singles], dtype=torch.int64)]
        positions += [torch.arange(span.first, span.first + span.count) for span in (*chunks, *fresh)]
        slots = [torch.tensor([span.table[span.first // size] * size + span.first % size for span in singles],
                              dtype=torch.int64)]  # fmt: skip
        for span, positions_of_span in zip((*chunks, *fresh), positions[1:], strict=True):
            slots.append(torch.tensor(span.table)[positions_of_span // size] * size + positions_of_span % size)
        # A table is padded with its last block: other texts' blocks may have numbers that are not finite.
        read_blocks = [span.table[: span.first // size + 1] for span in singles]
        longest = max(map(len, read_blocks), default=0)
        tables = [[*table, *[table[-1]] * (longest - len(table))] for table in read_blocks]
        chunk_views = []
        row = len(singles)
        for span in chunks:
            table = torch.tensor(span.table[: -(-(span.first + span.count) // size)], device=device)
            chunk_views.append(TokenChunk(row, span.count, table, span.first + span.count))
            row += span.count
        self.step = PagedStep(
            slots=torch.cat(slots).to(device),
            tables=torch.tensor(tables, dtype=torch.int64, device=device).reshape(len(singles), longest),
            lengths=positions[0].to(device) + 1,
            shortest=min((span.first + 1 for span in singles), default=0),
            longest=max((span.first + 1 for span in singles), default=0),
            chunks=chunk_views,
            fresh=[span.count for span in fresh],
            texts=torch.tensor([span.text for span in spans], dtype=torch.int64, device=device),
        )
        return torch.cat(positions)[None].to(device)

    def write(self, layer: int, *values: Tensor) -> tuple[Tensor, ...]:
        """Store the step's ``values``, each ``[tokens, heads, channels]``; return the memory of the layer.

        Only in this call a step writes to the cache, and only to the positions of its spans.
        """
        memory = self._layers.get(layer)
        if memory is None:
            shape = (self.blocks, self.block_size)
            self._layers[layer] = memory = tuple(value.new_zeros(*shape, *value.shape[1:]) for value in values)
        for stored, new in zip(memory, values, strict=True):
            stored.view(-1, *stored.shape[2:]).index_copy_(0, self.step.slots, new)
        return memory

    def states(self, layer: int, *shapes: tuple[tuple[int, ...], torch.dtype]) -> tuple[Tensor, ...]:
        """Return the memory of a layer's states, ``[texts, ...]`` for each of ``shapes``, for the layer to update.

        A text that begins does not read what an earlier one left there.
        """
        if layer not in self._states:
            device = self._device
            texts = self.texts
            self._states[layer] = tuple(torch.zeros(texts, *shape, dtype=d, device=device) for shape, d in shapes)
        return self._states[layer]

    @torch.inference_mode()
    def reserve(self, blocks: int) -> None:
        """Allocate memory for ``blocks`` blocks; growth by half limits copying."""
        if blocks > self.blocks:
            room = min(max(blocks, self.blocks * 3 // 2), self.capacity)
            self._replace(room, torch.arange(self.blocks))

    @torch.inference_mode()
    def keep(self, blocks: Sequence[int]) -> None:
        """Keep only ``blocks``, with the numbers 0, 1, 2, ..., and return the other memory."""
        self._replace(len(blocks), torch.tensor(blocks, dtype=torch.int64))

    def free(self) -> None:
        """Return all memory."""
        self.blocks = 0
        self._layers.clear()
        self._states.clear()

    @torch.inference_mode()
    def clear(self, blocks: Sequence[int]) -> None:
        """Set blocks to 0."""
        for memory in (tensor for layer in self._layers.values() for tensor in layer):
            memory[list(blocks)] = 0.0

    def _replace(self, room: int, sources: Tensor) -> None:
        """Allocate ``room`` blocks, and copy the blocks ``sources`` to the first ones, layer by layer."""
        self.blocks = room
        sources = sources.to(self._device)
        for layer, old in self._layers.items():
            new = tuple(tensor.new_zeros(room, *tensor.shape[1:]) for tensor in old)
            for target, source in zip(new, old, strict=True):
                target[: len(sources)] = source[sources]
            self._layers[layer] = new
