"""Cost of context parallelism per rank: bytes sent by attention, FLOPs, and memory for received keys and values.

A sequence has s tokens on c ranks; b is the number of sequences; h and g are the channels of all query heads and of all
key-value heads of a tensor-parallel rank (with latent attention the means of queries and outputs, and of keys and
values); n is the bytes per element and w the bytes per element of a gradient (4, in float64 8). A rank sends per layer:

    kind         forward                                   backward
    p2p          (c-1) 2 g (s/c) b n                       the same + c 2 g (s/c) b w
    all_gather   (c-1) 2 g (s/c) b n                       the same + (c-1) 2 g (s/c) b w
    a2a          (c-1)/c (2 h + 2 g') (s/c) b n            the same

g' are the channels of key-value heads after they are replicated so that every rank has some. a2a+p2p sends the bytes of
a2a among a ranks and the bytes of p2p around c/a ranks, with g'/a channels of parts of s a/c tokens.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from math import lcm

from megatron_core.config import RunConfig
from megatron_core.config.attention import attention_of
from megatron_core.planner.hardware import number_size
from megatron_core.planner.recurrence import RecurrenceCost


@dataclass(frozen=True)
class AttentionTraffic:
    """Bytes that a rank sends for the attention of one micro-batch."""

    forward: float
    backward: float


@dataclass(frozen=True)
class _Sizes:
    """Sizes of a rank's attention in one layer."""

    tokens: float
    query: int
    """Channels of all queries and of all outputs of attention."""
    groups: int
    head: int
    """Channels of one key and its value."""
    number: int
    gradient: int

    @classmethod
    def of(cls, config: RunConfig, layer_number: int) -> "_Sizes":
        attention = attention_of(config.model.of_layer(layer_number))
        tp = config.parallel.tensor_model_parallel_size
        cp = config.parallel.context_parallel_size
        channels = attention.query_head_size + attention.value_head_size
        number = number_size(config.training.compute_dtype)
        return cls(
            tokens=config.data.seq_length * config.training.micro_batch_size / cp,
            query=config.model.num_attention_heads // tp * channels,
            groups=attention.key_value_heads(tp),
            head=channels,
            number=number,
            gradient=max(number, 4),
        )


def layer_traffic(config: RunConfig, layer_number: int) -> AttentionTraffic:
    """Bytes sent in a layer; 0 without context parallelism."""
    sent = AttentionTraffic(0.0, 0.0)
    if config.model.has_attention(layer_number):
        sent = _attention_traffic(config, layer_number)
    if config.model.is_recurrent(layer_number):
        recurrence = RecurrenceCost.of(config, layer_number)
        sent = AttentionTraffic(sent.forward + recurrence.sent, sent.backward + recurrence.sent_back)
    return sent


def _attention_traffic(config: RunConfig, layer_number: int) -> AttentionTraffic:
    comm_type = comm_type_of(config, layer_number)
    cp = config.parallel.context_parallel_size
    sizes = _Sizes.of(config, layer_number)
    if comm_type == "p2p":
        return _ring(cp, sizes.groups * sizes.head * sizes.tokens, sizes)
    if comm_type == "all_gather":
        block = (cp - 1) * sizes.groups * sizes.head * sizes.tokens
        return AttentionTraffic(block * sizes.number, block * (sizes.number + sizes.gradient))
    a2a = cp if comm_type == "a2a" else config.parallel.a2a_size
    groups = lcm(sizes.groups, a2a)
    sent = (a2a - 1) / a2a * (sizes.query + groups * sizes.head) * sizes.tokens * sizes.number
    ring = _ring(cp // a2a, groups * sizes.head * sizes.tokens, sizes)
    return AttentionTraffic(sent + ring.forward, sent + ring.backward)


def traffic(config: RunConfig, layers: Iterable[int]) -> AttentionTraffic:
    """Bytes sent in several layers."""
    of_layers = [layer_traffic(config, layer) for layer in layers]
    return AttentionTraffic(sum(layer.forward for layer in of_layers), sum(layer.backward for layer in of_layers))


def layer_pairs(config: RunConfig, layer_number: int, cp_rank: int | None = None) -> float:
    """Pairs of a query and a visible key on a rank, per head, for a sequence without documents; without ``cp_rank``
    the largest number of all ranks.

    A rank that exchanges heads has the pairs of more tokens for fewer heads; the result is the mean over all heads that
    the rank has without the exchange.
    A layer without attention has none.
    """
    if not config.model.has_attention(layer_number):
        return 0.0
    parallel = config.parallel
    exchanged = {"a2a": parallel.context_parallel_size, "a2a+p2p": parallel.a2a_size}
    heads = exchanged.get(comm_type_of(config, layer_number), 1)
    size = parallel.context_parallel_size // heads
    width = _width(config, layer_number)
    length = config.data.seq_length
    pairs = _most_pairs(size, length, width) if cp_rank is None else _pairs(size, cp_rank // heads, length, width)
    return pairs / heads


def _width(config: RunConfig, layer_number: int) -> int:
    """Number of keys of a layer's window, or of the whole sequence."""
    window = config.model.window_of_layer(layer_number)
    length = config.data.seq_length
    return length if window is None or window[0] < 0 else min(window[0] + 1, length)


@lru_cache(maxsize=4096)
def _most_pairs(size: int, length: int, width: int) -> float:
    """The largest ``_pairs`` of all ranks."""
    return max(_pairs(size, rank, length, width) for rank in range(size))


@lru_cache(maxsize=4096)
def _pairs(size: int, rank: int, length: int, width: int) -> float:
    """Pairs of the tokens of one of ``size`` ranks, each with two chunks, for windows of ``width`` keys."""
    chunk = length / (2 * size)

    def before(position: float) -> float:
        return position * (position + 1) / 2 - max(position - width, 0) * (position - width + 1) / 2

    return sum(before((i + 1) * chunk) - before(i * chunk) for i in (rank, 2 * size - 1 - rank))


def attention_flops(config: RunConfig, layers: Iterable[int], cp_rank: int) -> float:
    """Forward FLOPs of a rank's scores and weighted values in some layers, for one micro-batch: 4 d per pair and head.

    Unlike ``config.flops`` it counts only visible keys.
    """
    attention = attention_of(config.model)
    heads = config.model.num_attention_heads // config.parallel.tensor_model_parallel_size
    pairs = sum(layer_pairs(config, layer, cp_rank) for layer in layers)
    channels = attention.query_head_size + attention.value_head_size
    return 2 * channels * heads * pairs * config.training.micro_batch_size


def arriving_bytes(config: RunConfig, layers: Iterable[int]) -> float:
    """Peak bytes of the keys and values of other ranks and of their gradients: the maximum over the layers."""
    return max((_arriving(config, layer) for layer in layers), default=0.0)


def _arriving(config: RunConfig, layer_number: int) -> float:
    model = config.model
    cp = config.parallel.context_parallel_size
    size = 0.0
    if cp > 1 and model.is_recurrent(layer_number):  # of all ranks, and their gradients
        size = 2 * RecurrenceCost.of(config, layer_number).sent * cp / (cp - 1)
    if cp > 1 and model.has_attention(layer_number):
        size = max(size, _arriving_keys(config, layer_number))
    return size


def _arriving_keys(config: RunConfig, layer_number: int) -> float:
    comm_type = comm_type_of(config, layer_number)
    cp = config.parallel.context_parallel_size
    sizes = _Sizes.of(config, layer_number)
    block = sizes.groups * sizes.head * sizes.tokens
    if comm_type == "all_gather":  # all blocks, and the gradients of all
        return block * cp * (sizes.number + sizes.gradient)
    if comm_type == "p2p":  # the current block, the next block, the current gradient, and the gradient in transfer
        return block * (2 * sizes.number + 2 * sizes.gradient)
    a2a = cp if comm_type == "a2a" else config.parallel.a2a_size
    exchanged = (sizes.query + lcm(sizes.groups, a2a) * sizes.head) * sizes.tokens * sizes.number
    ring = lcm(sizes.groups, a2a) * sizes.head * sizes.tokens * (2 * sizes.number + 2 * sizes.gradient)
    return exchanged + (ring if comm_type == "a2a+p2p" else 0.0)


def _ring(ranks: int, block: float, sizes: _Sizes) -> AttentionTraffic:
    if ranks == 1:
        return AttentionTraffic(0.0, 0.0)
    forward = (ranks - 1) * block * sizes.number
    return AttentionTraffic(forward, forward + ranks * block * sizes.gradient)


def comm_type_of(config: RunConfig, layer_number: int) -> str:
    """The kind of communication of a layer."""
    kinds: tuple[str, ...] = config.optional("cp_comm_type") or ("p2p",)
    return kinds[0] if len(kinds) == 1 else kinds[layer_number]
