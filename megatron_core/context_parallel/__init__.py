"""Attention over sequences that are split over several ranks (context parallelism)."""

from megatron_core.context_parallel.attention import SplitSequence, split_attention
from megatron_core.context_parallel.exchange import AllGatherExchange, Exchange, RingExchange
from megatron_core.context_parallel.heads import HeadExchange
from megatron_core.context_parallel.products import Mask, Products, Unfused, fused_products
from megatron_core.context_parallel.tiles import Tile, tiles
