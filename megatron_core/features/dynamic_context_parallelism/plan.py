"""Assignment of the documents of a global batch to ranks: arithmetic only."""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from itertools import groupby

LEAST_GAIN = 0.98
"""Work of the busiest rank, relative to before, that justifies messages between more ranks."""


@dataclass(frozen=True)
class DocumentRanks:
    """The ranks ``first`` to ``first + size - 1``, which share a document; ``first`` is a multiple of ``size``."""

    document: int
    first: int
    size: int


def ranks_needed(length: int, tokens_per_rank: int, smallest: int = 1) -> int:
    """The smallest power of 2, from ``smallest`` on, of ranks with at most ``tokens_per_rank`` of ``length`` tokens."""
    return max(smallest, 1 << (-(-length // tokens_per_rank) - 1).bit_length())


def assign(
    lengths: Sequence[int], ranks: int, tokens_per_rank: int, *, smallest: int = 1, linear: float = 0.0
) -> list[DocumentRanks]:
    """Assign documents to ``ranks`` ranks, a power of 2; the result is equal on all ranks, and in order of execution.

    The work of a rank on a document of s tokens over n ranks is s (s + ``linear``) / n: attention, and all other layers
    as ``linear`` more keys. Documents that need most ranks come first, each on the ranks with the least work. While a
    rank is idle, or the busiest one gets less work, the document with the most work per rank has twice as many ranks.
    Source: Megatron Core's ``BalancedCPScheduler``, which doubles them only for idle ranks.
    """
    # Every rank executes its documents in this one order. The first unfinished document then never waits for a later
    # one, so that ranks with different numbers of documents cannot block each other.
    sizes = [ranks_needed(length, tokens_per_rank, smallest) for length in lengths]
    placements, loads = _balanced(lengths, sizes, ranks, linear)
    while True:
        widest = max(
            (number for number, size in enumerate(sizes) if size < ranks),
            key=lambda number: (lengths[number] * (lengths[number] + linear) / sizes[number], -number),
            default=None,
        )
        if widest is None:
            return placements
        sizes[widest] *= 2
        wider, new_loads = _balanced(lengths, sizes, ranks, linear)
        if all(loads) and max(new_loads) > LEAST_GAIN * max(loads):
            return placements
        placements, loads = wider, new_loads


def _balanced(
    lengths: Sequence[int], sizes: Sequence[int], ranks: int, linear: float
) -> tuple[list[DocumentRanks], list[float]]:
    """The placements of documents on given numbers of ranks, and the work of each rank."""
    loads = [0.0] * ranks
    placements = []
    order = sorted(range(len(lengths)), key=lambda number: (-sizes[number], -lengths[number], number))
    for size, documents in groupby(order, key=lambda number: sizes[number]):
        # All documents so far are on as many ranks or more, so that the ranks of a block have equal work.
        blocks = [(loads[first], first) for first in range(0, ranks, size)]
        heapify(blocks)
        for number in documents:
            load, first = blocks[0]
            heapreplace(blocks, (load + lengths[number] * (lengths[number] + linear) / size, first))
            placements.append(DocumentRanks(number, first, size))
        for load, first in blocks:
            loads[first : first + size] = [load] * size
    return placements, loads
