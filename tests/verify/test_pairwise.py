"""The selection rule of parameter combinations."""

from __future__ import annotations

from itertools import combinations, product

from megatron_core.verify.comparison import pairwise


def test_every_pair_of_values_is_drawn() -> None:
    axes = {"kernels": "ab", "dtype": "abc", "shape": "abcdefg", "kind": "abcd"}
    product_of_axes = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
    kept = pairwise(product_of_axes, "a test")
    assert kept == pairwise(product_of_axes, "a test") and 28 <= len(kept) <= 34
    for one, other in combinations(axes, 2):
        found = {(product_of_axes[i][one], product_of_axes[i][other]) for i in kept}
        assert found == set(product(axes[one], axes[other]))
    assert pairwise([{"shape": "a"}, {"shape": "b"}], "") == {0, 1}
