"""Sums over parts in the order of a tree, which is the same for every number of ranks that own whole subtrees."""

from collections.abc import Callable, Sequence
from functools import reduce

import torch
from torch import Tensor

from megatron_core.config.tree import smallest_factor

Add = Callable[[Tensor, Tensor], Tensor]


def tree_sum(terms: Sequence[Tensor], add: Add = torch.add) -> Tensor:
    """The sum of ``terms``: neighbours in groups of the smallest prime factor of their number, then the sums of the
    groups in the same way; each addition rounds to the dtype of the parts. ``Tensor.add_`` overwrites the parts."""
    values = list(terms)
    while len(values) > 1:
        # A rank that owns a subtree computes the same partial sums as a larger group of ranks does, which a sum from
        # left to right would not.
        width = smallest_factor(len(values))
        values = [reduce(add, values[first : first + width]) for first in range(0, len(values), width)]
    return values[0]
