"""Pairwise testing: select a subset of combinations that contains every pair of values."""

from collections.abc import Mapping, Sequence
from itertools import combinations
from random import Random


def pairwise(combined: Sequence[Mapping[str, str]], seed: str) -> set[int]:
    """Indices of a subset that contains every pair of values in ``combined``, chosen greedily in a seeded order."""
    pairs: list[set[object]] = [
        set(combinations(sorted(values.items()), 2)) or set(values.items()) for values in combined
    ]
    order = list(range(len(combined)))
    subset = set[int]()
    missing = set[object]().union(*pairs)
    Random(seed).shuffle(order)
    while missing:
        best = max(order, key=lambda i: len(pairs[i] & missing))
        missing -= pairs[best]
        subset.add(best)
    return subset
