"""The tree of sums with --layout-invariant, as integers (``parallel.tree_sum`` computes it)."""


def smallest_factor(number: int) -> int:
    """The smallest prime factor of an integer above 1."""
    return next(factor for factor in range(2, number + 1) if number % factor == 0)


def default_parts(heads: int) -> int:
    """The largest of 8, 4 and 2 that divides the attention heads, else their smallest factor."""
    return next((factor for factor in (8, 4, *range(2, heads + 1)) if heads % factor == 0), 1)
