"""Attention of this rank's queries over the keys of all ranks."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_core.features.context_parallelism.exchange import Exchange
from megatron_core.features.context_parallelism.products import Products, finite, merge_
from megatron_core.features.context_parallelism.tiles import Documents, Tile, tiles
from megatron_core.ops.rows import wide
from megatron_core.parallel.micro_batch import zigzag


@dataclass(frozen=True)
class SplitSequence:
    """A sequence of ``length`` tokens, split in a zig-zag over the ranks of ``exchange.group``, and its masking."""

    length: int
    exchange: Exchange
    products: Products
    documents: Documents | None = None
    """Lengths of the documents in each whole sequence; None: each sequence is one document."""
    window: int | None = None
    """Number of keys visible to a query: its own and the preceding ones; None: all."""
    causal: bool = True
    """Whether keys after a query are masked; otherwise ``products`` apply the mask."""

    def tiles_with(self, owner: int) -> tuple[Tile, ...]:
        """The tiles of this rank's queries with the keys of rank ``owner``."""
        size = self.exchange.group.size()
        rank = self.exchange.group.rank()
        # The mask of the caller hides keys anywhere, so no part can be left out.
        if not self.causal:
            everything = 0, self.length // size
            return (Tile(None, everything, everything),)
        queries, keys = (zigzag(self.length, member, size) for member in (rank, owner))
        return tiles(queries, keys, self.documents, self.window)


def split_attention(
    query: Tensor, key: Tensor, value: Tensor, sequence: SplitSequence, sinks: Tensor | None = None
) -> Tensor:
    """softmax(Q K^T / sqrt(d)) V over all visible keys on all ranks.

    ``[b, heads, n, d]``, ``[b, groups, n, d]``, ``[b, groups, n, e]`` -> ``[b, heads, n, e]``; n is the length of this
    rank's part of the sequence, and e are the channels of values: e = d, except in latent attention, where e < d.
    ``sinks`` ``[heads]`` are scores of one more key of every query, whose value is 0 (gpt-oss, arXiv 2508.10925,
    section 2.2).
    """
    return _SplitAttention.apply(query, key, value, sinks, sequence)


class _SplitAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, sinks, sequence):
        local = torch.cat((key, value), dim=-1)  # one message
        # Parts of a softmax are merged in float32 or wider: in bfloat16 each merge would round the output once more.
        out = query.new_zeros((*query.shape[:-1], value.shape[-1]), dtype=wide(query.dtype))
        if sinks is None:
            lse = out.new_full(query.shape[:-1], -torch.inf)
        else:  # the softmax of the sink alone, whose output is 0
            lse = out.new_empty(query.shape[:-1]).copy_(sinks[:, None])
        # The block of this rank comes first, so that the first message travels during the largest part of the work: the
        # triangles on the diagonal.
        for owner, block in sequence.exchange.forward(local):
            keys, values = _keys_and_values(block, query)
            for tile in sequence.tiles_with(owner):
                rows, read = _ranges(tile)
                partial = sequence.products.forward(query[rows], keys[read], values[read], tile, owner)
                merge_(out[rows], lse[rows], *partial)
        out = out.to(query.dtype)
        # Only this rank's tensors are saved; backward exchanges keys and values again, so that memory does not grow
        # with the number of ranks.
        ctx.save_for_backward(query, local, out, finite(lse), sinks)
        ctx.sequence = sequence
        return out

    @staticmethod
    def backward(ctx, grad):
        query, local, out, lse, sinks = ctx.saved_tensors
        sequence = ctx.sequence
        # Sums over all ranks' keys in float32 or wider, as in forward.
        grad_query = torch.zeros_like(query, dtype=lse.dtype)

        def gradient_of(owner: int, block: Tensor) -> Tensor:
            # Sent in this dtype, too: the ring adds one contribution on each rank.
            total = torch.zeros_like(block, dtype=lse.dtype)
            (keys, values), grads = (_keys_and_values(pair, query) for pair in (block, total))
            for tile in sequence.tiles_with(owner):
                rows, read = _ranges(tile)
                operands = grad[rows], query[rows], keys[read], values[read], out[rows], lse[rows]
                sums = grad_query[rows], grads[0][read], grads[1][read]
                for sum_, gradient in zip(sums, sequence.products.backward(*operands, tile, owner), strict=True):
                    sum_ += gradient
            return total

        grad_key, grad_value = _keys_and_values(sequence.exchange.backward(local, gradient_of).to(query.dtype), query)
        grad_sinks = None
        if sinks is not None:  # p (0 - sum over keys of p dp) for the weight p of a sink
            weights = (sinks.to(lse.dtype)[:, None] - lse).exp()
            grad_sinks = -(weights * (grad * out).sum(-1)).sum((0, 2)).to(sinks.dtype)
        return grad_query.to(query.dtype), grad_key, grad_value, grad_sinks, None


def _keys_and_values(block: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
    keys, values = block.tensor_split([query.shape[-1]], dim=-1)
    return keys, values


def _ranges(tile: Tile) -> tuple[tuple[slice, slice, slice], tuple[slice, slice, slice]]:
    """The queries and the keys of a tile in ``[b, heads, n, ...]``."""
    heads = slice(None)
    return (tile.rows, heads, slice(*tile.queries)), (tile.rows, heads, slice(*tile.keys))
