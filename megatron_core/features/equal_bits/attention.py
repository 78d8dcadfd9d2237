"""Core attention with the same bits in every layout.

Each chunk of queries attends to all keys before it and to its own, in separate products. Every rank computes its own
chunks of queries over the keys of the whole sequence, which it gathers. The gradients of keys and values are sums over
chunks of queries: chunks c and C - 1 - c first, which are on one rank in every zig-zag, then the tree over these pairs.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from megatron_core.errors import LayoutError
from megatron_core.features.context_parallelism.core_attention import ContextParallelAttention
from megatron_core.features.context_parallelism.exchange import Exchange
from megatron_core.features.context_parallelism.products import Products, finite, merge_
from megatron_core.features.context_parallelism.tiles import Documents, Tile, tiles
from megatron_core.features.equal_bits.invariance import Invariance, reduce_scatter_in_tree
from megatron_core.ops.rows import wide
from megatron_core.parallel.groups import Group
from megatron_core.parallel.micro_batch import Range, zigzag
from megatron_core.parallel.tree_sum import tree_sum
from megatron_core.transformer.context import LayerContext, SequenceContext


@dataclass(frozen=True)
class ChunkedSequence:
    """A sequence of ``length`` tokens in ``chunks`` chunks, split in a zig-zag over the ranks of ``exchange.group``."""

    length: int
    chunks: int
    exchange: Exchange
    products: Products
    documents: Documents | None
    window: int | None

    @property
    def group(self) -> Group:
        """The ranks with parts of the sequence."""
        return self.exchange.group

    def own_chunks(self) -> Iterator[tuple[int, Range]]:
        """The local start and the positions of each chunk on this rank, in ascending order."""
        size = self.length // self.chunks
        local_start = 0
        for first, stop in zigzag(self.length, self.group.rank(), self.group.size()):
            for start in range(first, stop, size):
                yield local_start, (start, start + size)
                local_start += size

    def tiles(self, chunk: Range) -> Iterator[tuple[slice, Tile]]:
        """The tiles of a chunk of queries: the queries within the chunk, and the tile in positions of the sequence."""
        for tile in _tiles_of(chunk, self.documents, self.window):
            first, stop = tile.queries
            yield slice(first, stop), replace(tile, queries=(first + chunk[0], stop + chunk[0]))

    def gathered(self, local: Tensor) -> Tensor:
        """Keys and values ``[b, groups, n, e]`` of this rank -> those of the whole sequence, in ascending order."""
        size = self.group.size()
        if size == 1:
            return local
        sequence = local.new_empty((*local.shape[:2], self.length, local.shape[3]))
        for rank, block in self.exchange.forward(local.contiguous()):
            row = 0
            for start, stop in zigzag(self.length, rank, size):
                sequence[:, :, start:stop] = block[:, :, row : row + stop - start]
                row += stop - start
        return sequence

    def own_sum(self, total: Tensor) -> Tensor:
        """Gradients of the whole sequence from this rank's queries -> sums over ranks for this rank's tokens."""
        size = self.group.size()
        if size == 1:
            return total
        runs_of_ranks = [[total[:, :, slice(*run)] for run in zigzag(self.length, rank, size)] for rank in range(size)]
        return reduce_scatter_in_tree(torch.stack([torch.cat(runs, dim=2) for runs in runs_of_ranks]), self.group)[0]


@lru_cache(maxsize=1024)
def _tiles_of(chunk: Range, documents: Documents | None, window: int | None) -> tuple[Tile, ...]:
    before = ((0, chunk[0]),) if chunk[0] else ()
    return tiles((chunk,), (*before, chunk), documents, window)


class InvariantAttention(ContextParallelAttention):
    """``CoreAttention`` by chunks of queries, over the keys of all ranks of ``exchange``."""

    def __init__(self, context: LayerContext, layer_number: int, *, invariance: Invariance, **options: Any) -> None:
        super().__init__(context, layer_number, **options)
        self.invariance = invariance

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, context: SequenceContext, sinks: Tensor | None = None
    ) -> Tensor:
        """Query ``[n, b, heads, d]``, key, value ``[n, b, groups, d]`` -> ``[n, b, heads * d]``; n local tokens."""
        assert sinks is None, "validated: softmax_type=vanilla"
        sequence = self._sequence(query, context)
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = _ChunkedAttention.apply(query, key, value, sequence)
        return out.permute(2, 0, 1, 3).flatten(2)

    def attend_cached(
        self, query: Tensor, keys: Tensor, values: Tensor, step: Any, sinks: Tensor | None = None
    ) -> Tensor:
        """As ``CoreAttention``, with the bits of ``forward``; each token takes the products of its whole chunk."""
        outputs = []
        for row, (table, length) in enumerate(zip(step.tables, step.lengths.tolist(), strict=True)):
            outputs.append(
                self._attend_last(query[row : row + 1], *(step.gathered(x, table, length) for x in (keys, values)))
            )
        for chunk in step.chunks:
            chunk_query = query[chunk.row : chunk.row + chunk.count]
            outputs.append(
                self._attend_last(chunk_query, *(step.gathered(x, chunk.table, chunk.length) for x in (keys, values)))
            )
        return torch.cat(outputs)

    def attend_fresh(self, query: Tensor, key: Tensor, value: Tensor, step: Any, sinks: Tensor | None = None) -> Tensor:
        """As ``CoreAttention``, with the bits of ``forward``."""
        texts = zip(*(x.split(list(step.fresh)) for x in (query, key, value)), strict=True)
        return torch.cat([self._attend_last(*text) for text in texts])

    def _attend_last(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention of the last n of t positions: ``[n, heads, d]`` and ``[t, groups, d]`` -> ``[n, heads * d]``.

        A chunk of queries and its keys are filled with zeros, so that each product has the shape that it has in a
        whole sequence; within such a product no row depends on the others.
        """
        size = self.invariance.sequence_length // self.invariance.chunks
        length = len(key)
        first = length - len(query)
        channels = query.shape[-1]
        # Products may depend on strides, so these are the strides of ``forward``.
        padded = key.new_zeros(1, key.shape[1], -(-length // size) * size, channels + value.shape[-1])
        padded[0, :, :length] = torch.cat((key, value), dim=-1).transpose(0, 1)
        keys, values = padded.tensor_split([channels], dim=-1)
        products = self._products(query, length, SequenceContext())
        outputs = []
        for start in range(first // size * size, length, size):
            begin, end = max(first, start), min(length, start + size)
            inside = slice(begin - start, end - start)
            queries = query.new_zeros(size, 1, *query.shape[1:])
            queries[inside, 0] = query[begin - first : end - first]
            queries = queries.permute(1, 2, 0, 3)
            # Parts of larger tensors, as in ``forward``: torch computes the logaddexp of ``merge_`` in vectors or one
            # by one, with other bits, depending on whether heads are adjacent in memory.
            room = queries.new_zeros(1, query.shape[1], 2 * size, value.shape[-1], dtype=wide(query.dtype))
            out = room[:, :, :size]
            lse = room.new_full(room.shape[:3], -torch.inf)[:, :, :size]
            for tile in _tiles_of((start, start + size), None, self.window):
                inner = slice(0, tile.queries[1] - tile.queries[0])
                _add_tile_(out, lse, (queries, keys, values), products, tile.queries[0], inner, tile)
            outputs.append(out[0, :, inside].to(query.dtype).transpose(0, 1).flatten(1))
        return torch.cat(outputs)

    def _sequence(self, query: Tensor, context: SequenceContext) -> ChunkedSequence:
        length = query.shape[0] * self.exchange.group.size()
        chunks = self.invariance.chunks
        if context.attention_mask is not None and context.documents is None:
            raise LayoutError("layout_invariant=True: attention_mask is not supported; give document_lengths instead")
        if length % chunks:
            raise LayoutError(
                f"layout_invariant=True: a sequence of {length} tokens cannot be cut into layout_invariant_chunks="
                f"{chunks} chunks; choose a length that is a multiple of them"
            )
        documents = None if context.documents is None else context.documents.lengths
        products = self._products(query, length, context)
        return ChunkedSequence(length, chunks, self.exchange, products, documents, self.window)

    def _products(self, query: Tensor, length: int, context: SequenceContext) -> Products:
        positions = self._positions(0, length, query.device)
        return super()._products(query, length, replace(context, attention_mask=None, positions=positions))

    def _positions(self, rank: int, length: int, device: torch.device) -> Tensor:
        """Positions of whole sequences, in which tiles are counted."""
        return torch.arange(length, device=device)


class _ChunkedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, sequence):
        local = torch.cat((key, value), dim=-1)
        keys, values = sequence.gathered(local).tensor_split([query.shape[-1]], dim=-1)
        out = query.new_zeros((*query.shape[:-1], value.shape[-1]), dtype=wide(query.dtype))
        lse = out.new_full(query.shape[:-1], -torch.inf)
        for start, chunk in sequence.own_chunks():
            for inside, tile in sequence.tiles(chunk):
                _add_tile_(out, lse, (query, keys, values), sequence.products, start, inside, tile)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, local, out, finite(lse))
        ctx.sequence = sequence
        return out

    @staticmethod
    def backward(ctx, grad):
        query, local, out, lse = ctx.saved_tensors
        sequence = ctx.sequence
        channels = query.shape[-1]
        gathered = sequence.gathered(local)
        keys, values = gathered.tensor_split([channels], dim=-1)
        grad_query = torch.zeros_like(query, dtype=lse.dtype)
        by_chunk = []
        for start, chunk in sequence.own_chunks():
            # Keys after the chunk have gradients of 0, which the sums need not add.
            total = torch.zeros(
                (*gathered.shape[:2], chunk[1], gathered.shape[3]), dtype=lse.dtype, device=gathered.device
            )
            grads = total.tensor_split([channels], dim=-1)
            for inside, tile in sequence.tiles(chunk):
                rows, columns = _indices(start, inside, tile)
                operands = grad[rows], query[rows], keys[columns], values[columns], out[rows], lse[rows]
                sums = grad_query[rows], grads[0][columns], grads[1][columns]
                for sum_, addend in zip(sums, sequence.products.backward(*operands, tile, 0), strict=True):
                    sum_ += addend
            by_chunk.append(total)
        half = len(by_chunk) // 2
        pairs = [
            _add_shorter(later, first) for first, later in zip(by_chunk[:half], reversed(by_chunk[half:]), strict=True)
        ]
        total = tree_sum(pairs, _add_shorter)
        total = nn.functional.pad(total, (0, 0, 0, gathered.shape[2] - total.shape[2]))
        total = sequence.own_sum(total).to(query.dtype)
        grad_key, grad_value = total.tensor_split([channels], dim=-1)
        return grad_query.to(query.dtype), grad_key, grad_value, None


def _add_tile_(
    out: Tensor,
    lse: Tensor,
    qkv: tuple[Tensor, Tensor, Tensor],
    products: Products,
    start: int,
    inside: slice,
    tile: Tile,
) -> None:
    """Merge the attention of the queries ``inside`` a chunk, which begins at ``start``, over the keys of a tile."""
    query, keys, values = qkv
    rows, columns = _indices(start, inside, tile)
    merge_(out[rows], lse[rows], *products.forward(query[rows], keys[columns], values[columns], tile, 0))


def _add_shorter(total: Tensor, shorter: Tensor) -> Tensor:
    """total += shorter, gradients of a part of its keys: ``[b, heads, n, e]``."""
    total[:, :, : shorter.shape[2]] += shorter
    return total


def _indices(start: int, inside: slice, tile: Tile) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """The queries and the keys of a tile in ``[b, heads, n, ...]``."""
    heads = slice(None)
    return (tile.rows, heads, slice(start + inside.start, start + inside.stop)), (tile.rows, heads, slice(*tile.keys))
