"""The tree of sums with --layout-invariant, as integers (``parallel.tree_sum`` computes it)."""

from itertools import pairwise


def smallest_factor(number: int) -> int:
    """The smallest prime factor of an integer above 1."""
    return next(factor for factor in range(2, number + 1) if number % factor == 0)


def subtree_sizes(num_parts: int) -> list[int]:
    """The numbers of neighbouring parts that the tree joins to one partial sum, from 1 to ``num_parts``."""
    sizes = [1]
    while sizes[-1] < num_parts:
        sizes.append(sizes[-1] * smallest_factor(num_parts // sizes[-1]))
    return sizes


def additions(num_parts: int) -> list[int]:
    """For each part, the additions of the tree after it, if partial sums are put on a stack and each addition replaces
    the upper two by their sum."""
    sizes = subtree_sizes(num_parts)
    # A complete subtree is added to the sum of those before it in the same larger subtree, if there are any.
    return [
        sum(done % size == 0 and done % larger != size for size, larger in pairwise(sizes))
        for done in range(1, num_parts + 1)
    ]


def default_parts(heads: int) -> int:
    """The largest of 8, 4 and 2 that divides the attention heads, else their smallest factor."""
    return next((factor for factor in (8, 4, *range(2, heads + 1)) if heads % factor == 0), 1)
