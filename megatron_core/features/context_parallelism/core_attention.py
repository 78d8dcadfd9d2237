"""Core attention for sequences split over context-parallel ranks."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from megatron_core.errors import LayoutError
from megatron_core.features.context_parallelism.attention import SplitSequence, split_attention
from megatron_core.features.context_parallelism.exchange import Exchange, HeadExchange, RingExchange, exchanges_of
from megatron_core.features.context_parallelism.products import Mask, Products, Unfused, fused_products
from megatron_core.features.context_parallelism.tiles import Tile
from megatron_core.parallel.groups import ALONE, Group
from megatron_core.parallel.micro_batch import SequenceSplit
from megatron_core.transformer.context import LayerContext, SequenceContext
from megatron_core.transformer.core_attention import CoreAttention


class ContextParallelAttention(CoreAttention):
    """``CoreAttention`` over keys and values of all ranks of ``exchange``; sequences are split in zig-zag order.

    It is also the attention with sinks of one rank.

    Source: Liu et al. 2023 (ring attention); Dubey et al. 2024, section 3.3.2 (gathered keys and values).
    """

    def __init__(
        self,
        context: LayerContext,
        layer_number: int,
        *,
        exchange: Exchange,
        window_size: tuple[int, int] | None = None,
        heads_over: Group = ALONE,
    ) -> None:
        super().__init__(context, layer_number, window_size=window_size, heads_over=heads_over)
        self.exchange = exchange

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, context: SequenceContext, sinks: Tensor | None = None
    ) -> Tensor:
        """Query ``[n, b, heads, d]``, key, value ``[n, b, groups, d]`` -> ``[n, b, heads * d]``; n local tokens."""
        # Each rank has an equal part of the sequence.
        length = query.shape[0] * self.exchange.group.size()
        documents = None if context.documents is None else context.documents.lengths
        products = self._products(query, length, context)
        # A mask of the caller replaces causality; documents and windows are causal by definition.
        causal = context.attention_mask is None or documents is not None or self.window is not None
        sequence = SplitSequence(length, self.exchange, products, documents, self.window, causal)
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = split_attention(query, key, value, sequence, sinks)
        return out.permute(2, 0, 1, 3).flatten(2)

    def _products(self, query: Tensor, length: int, context: SequenceContext) -> Products:
        mask = None if context.attention_mask is None else self._mask(context.attention_mask, length)
        # Fused kernels have neither dropout by position nor bounded scores.
        if not (self.by_formula or self.dropout.active):
            return fused_products(query.device, query.dtype, mask)
        if not self.dropout.active:
            return Unfused(softcap=self.softcap, mask=mask)
        queries = context.positions
        samples = context.sample_index
        assert queries is not None and samples is not None, "dropout is keyed by positions and samples"
        # A document of a packed sample does not begin at position 0.
        start = queries[:1] - self._positions(self.exchange.group.rank(), length, queries.device)[:1]

        def drop(weights: Tensor, tile: Tile, owner: int) -> Tensor:
            # Dropout is a function of positions in the whole sequence: the owner's, not this rank's.
            keys = start + self._positions(owner, length, weights.device)
            return self.dropout(
                weights,
                samples[tile.rows],
                position_ids=queries[slice(*tile.queries)],
                key_positions=keys[slice(*tile.keys)],
                first_head=self.first_head,
            )

        return Unfused(drop, self.softcap, mask)

    def _mask(self, mask: Tensor, length: int) -> Mask:
        """Return a function that cuts tiles from a mask of whole sequences, ``[b or 1, 1, s, s]``."""
        if mask.shape[-2:] != (length, length):
            raise LayoutError(
                f"attention_mask is {list(mask.shape)}; with context parallelism give that of whole sequences, "
                f"[b, 1, {length}, {length}]"
            )
        # The rows of this rank's queries once; each tile then takes its columns.
        local = mask[:, :, self._positions(self.exchange.group.rank(), length, mask.device)]

        def cut(tile: Tile, owner: int) -> Tensor:
            rows = tile.rows if len(local) > 1 else slice(None)
            keys = self._positions(owner, length, mask.device)[slice(*tile.keys)]
            return local[rows, :, slice(*tile.queries)][..., keys]

        return cut

    def _positions(self, rank: int, length: int, device: torch.device) -> Tensor:
        """Return the positions of the tokens of a rank of the exchange in their sequences."""
        return SequenceSplit(cp_rank=rank, cp_size=self.exchange.group.size()).positions(length, device)


class HeadParallelAttention(nn.Module):
    """Apply the core ``inner`` to a subset of heads on longer parts of the sequence.

    These parts are the whole sequence, or one part per rank of ``ring``. Source: Jacobs et al. 2023
    (DeepSpeed-Ulysses).
    """

    def __init__(self, inner: nn.Module, heads: Group, *, ring: Group) -> None:
        super().__init__()
        self.inner = inner
        self.exchange = HeadExchange(heads)
        self.ring = ring

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, context: SequenceContext, sinks: Tensor | None = None
    ) -> Tensor:
        """Query ``[n, b, heads, d]``, key, value ``[n, b, groups, d]`` -> ``[n, b, heads * d]``; n local tokens."""
        if sinks is not None:
            # Each rank has some of the heads after the exchange, and the sinks of these.
            sinks = sinks.chunk(self.exchange.group.size())[self.exchange.group.rank()]
        query, key, value = self.exchange.to_heads(query, key, value)
        split = SequenceSplit(cp_rank=self.ring.rank(), cp_size=self.ring.size())
        positions = split.positions(len(query) * self.ring.size(), query.device)
        return self.exchange.to_sequence(self.inner(query, key, value, replace(context, positions=positions), sinks))


def tiled_attention(
    context: LayerContext,
    layer_number: int,
    *,
    window_size: tuple[int, int] | None = None,
    attention: Callable[..., nn.Module] | None = None,
) -> nn.Module:
    """The core attention of a layer with sinks, or whose sequences are split over ranks, for its ``cp_comm_type``.

    ``attention`` replaces ``ContextParallelAttention``.
    """
    config = context.config
    inner = partial(attention or ContextParallelAttention, context, layer_number, window_size=window_size)
    if context.cp.whole.size() == 1:
        return inner(exchange=RingExchange(ALONE))
    comm_types = context.parallel.cp_comm_type
    comm_type = comm_types[min(layer_number, len(comm_types) - 1)]  # further layers are like the last one
    exchange, heads = exchanges_of(comm_type, context.cp)
    if heads is None:
        return inner(exchange=exchange)
    has_sinks = config.has_sinks and config.attention_backend != "unfused"
    if comm_type == "a2a" and attention is None and not has_sinks:
        plain = CoreAttention(context, layer_number, window_size=window_size, heads_over=heads)
        return HeadParallelAttention(plain, heads, ring=ALONE)
    return HeadParallelAttention(inner(exchange=exchange, heads_over=heads), heads, ring=exchange.group)
