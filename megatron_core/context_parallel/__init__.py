"""Attention over sequences whose tokens lie on several ranks."""

from megatron_core.context_parallel.attention import SharedSequence, shared_attention
from megatron_core.context_parallel.exchange import AllGather, Exchange, Ring
from megatron_core.context_parallel.heads import HeadExchange
from megatron_core.context_parallel.products import Mask, Products, Unfused, fused_products
from megatron_core.context_parallel.tiles import Tile, tiles
