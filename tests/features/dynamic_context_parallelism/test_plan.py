"""The assignment of documents to ranks."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from megatron_core.features.dynamic_context_parallelism.plan import DocumentRanks, assign, ranks_needed

# (ranks, tokens per rank, lengths, ranks of each document in Megatron Core's ``BalancedCPScheduler``, August 2026, and
# its work: the sum over its groups of documents of the largest sum of s^2 / n of a rank).
MEGATRON: list[tuple[int, int, list[int], list[int], float]] = [
    (4, 8, [5, 10, 8, 1, 1, 3, 3, 10, 20, 3], [1, 2, 1, 1, 1, 1, 1, 2, 4, 1], 214.0),
    (
        8,
        16,
        [2, 3, 24, 17, 5, 29, 6, 14, 101, 5, 23, 29, 8, 4, 51, 44, 39, 21, 13, 37, 8, 3, 7, 6],
        [1, 1, 2, 2, 1, 2, 1, 1, 8, 1, 2, 2, 1, 1, 4, 4, 4, 2, 1, 4, 1, 1, 1, 1],
        2948.625,
    ),
    (8, 4, [1, 1, 8], [2, 2, 4], 16.0),
    (2, 32, [15, 3, 14, 12, 40, 6, 18], [1, 1, 1, 1, 2, 1, 1], 1268.0),
]


def work(placements: list[DocumentRanks], lengths: list[int], ranks: int) -> list[float]:
    """The sum of s^2 / n of each rank."""
    loads = [0.0] * ranks
    for placement in placements:
        for rank in range(placement.first, placement.first + placement.size):
            loads[rank] += lengths[placement.document] ** 2 / placement.size
    return loads


@pytest.mark.parametrize(("ranks", "tokens", "lengths", "sizes", "busiest"), MEGATRON)
def test_documents_have_the_ranks_of_megatrons_scheduler(
    ranks: int, tokens: int, lengths: list[int], sizes: list[int], busiest: float
) -> None:
    """A document has at least the ranks that its length needs; the busiest rank has no more work, and the documents
    have the same numbers of ranks if that does not need other ones."""
    placements = assign(lengths, ranks, tokens)
    found = {placement.document: placement.size for placement in placements}
    assert all(size >= ranks_needed(length, tokens) for size, length in zip(sizes, lengths, strict=True))
    assert max(work(placements, lengths, ranks)) <= busiest
    if ranks in (2, 8) and tokens > 4:
        assert [found[number] for number in range(len(lengths))] == sizes


@pytest.mark.parametrize("seed", range(20))
def test_placements_are_nested_blocks_and_ranks_have_equal_work(seed: int) -> None:
    draw = random.Random(seed)
    ranks, tokens, count = draw.choice([1, 2, 4, 16]), draw.choice([4, 64]), draw.choice([1, 3, 40])
    lengths = [min(tokens * ranks, 1 + int(draw.expovariate(1 / tokens))) for _ in range(count)]
    smallest = draw.choice([1, ranks])
    placements = assign(lengths, ranks, tokens, smallest=smallest, linear=10.0)
    assert sorted(placement.document for placement in placements) == list(range(count))
    for placement in placements:
        assert placement.first % placement.size == 0
        assert placement.first + placement.size <= ranks
        assert max(smallest, ranks_needed(lengths[placement.document], tokens)) <= placement.size
        assert -(-lengths[placement.document] // placement.size) <= tokens
    # Ranks that share documents meet in one order: by falling number of ranks.
    assert all(first.size >= second.size for first, second in pairwise(placements))
    loads = work(placements, lengths, ranks)
    assert min(loads) > 0
    if count == 40:
        assert max(loads) < 2 * sum(loads) / ranks


@pytest.mark.parametrize(("length", "ranks"), [(1, 1), (8, 1), (9, 2), (16, 2), (17, 4), (33, 8), (64, 8)])
def test_needed_ranks_are_a_power_of_two(length: int, ranks: int) -> None:
    assert ranks_needed(length, 8) == ranks
    assert ranks_needed(length, 8, smallest=2) == max(ranks, 2)
