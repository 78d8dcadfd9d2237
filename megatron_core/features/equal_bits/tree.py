"""The partial sums of the tree of ``parallel.tree_sum``, as integers."""

from itertools import pairwise

from megatron_core.config.tree import smallest_factor


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
