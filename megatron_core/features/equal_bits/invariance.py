"""Sums whose bits do not depend on the layout (``--layout-invariant``): canonical parts and the tree that joins them.

Ranks split three kinds of dimensions, and a sum over each of them takes one order in every layout:

- features of a layer (tensor parallelism) are cut into ``parts`` equal parts. Each part gives one partial sum, and the
  tree of ``tree_sum`` joins the parts. A rank owns neighbouring parts that are one subtree, so it joins its own, and
  the collectives of this file continue with the partial sums of the ranks.
- tokens are cut into sequences and each sequence into ``chunks`` equal chunks. Products over the tokens of a chunk are
  the addends of weight gradients, and ``ops.exact_sum`` adds them without rounding, in any order.
- queries in attention are cut into the same chunks (``transformer.invariant_attention``).

Every matrix product has the same shape in every layout (``ops.fixed_products``).
"""

from dataclasses import dataclass, replace

from torch import Tensor

from megatron_core.errors import LayoutError
from megatron_core.parallel import collectives
from megatron_core.parallel.groups import Group
from megatron_core.parallel.tree_sum import tree_sum


@dataclass(frozen=True)
class Invariance:
    """The canonical parts of a run; equal in all layouts of it, except for ``local_chunks``."""

    feature_parts: int
    """Parts of features, heads and vocabulary."""
    chunks: int
    """Chunks of each sequence."""
    sequences: int
    """Upper bound of the sequences in a global batch."""
    sequence_length: int
    """Upper bound of the tokens in a sequence."""
    context_ranks: int = 1
    """Ranks over which each sequence is split."""

    def over(self, ranks: int) -> "Invariance":
        """The same with each local sequence split over ``ranks`` ranks."""
        return replace(self, context_ranks=self.context_ranks * ranks)

    @property
    def products(self) -> int:
        """Upper bound of the addends of a weight's gradient: one product for each chunk and each part."""
        return self.sequences * self.chunks * self.feature_parts

    @property
    def tokens(self) -> int:
        """Upper bound of the tokens in a global batch."""
        return self.sequences * self.sequence_length

    def chunks_of(self, length: int) -> list[slice]:
        """The chunks of a local sequence of ``length`` tokens; LayoutError if they would be cut."""
        local = self.chunks // self.context_ranks
        if length % local:
            raise LayoutError(
                f"layout_invariant=True: a sequence of {length * self.context_ranks} tokens cannot be cut into "
                f"layout_invariant_chunks={self.chunks} chunks; choose a length that is a multiple of them"
            )
        size = length // local
        return [slice(start, start + size) for start in range(0, length, size)]

    def local_parts(self, group: Group) -> int:
        """Number of parts of each rank of ``group``."""
        return self.feature_parts // group.size()


def all_reduce_in_tree(x: Tensor, group: Group) -> Tensor:
    """Return the tree's sum of ``x`` over the group on every rank."""
    size = group.size()
    if size == 1:
        return x
    if size == 2:  # the sum of two numbers does not depend on their order
        total = x.clone()
        collectives.all_reduce_(total, group)
        return total
    flat = x.reshape(-1)
    share = -(-flat.numel() // size)
    padded = x.new_zeros(share * size)
    padded[: flat.numel()] = flat
    collectives.all_gather_flat_(padded, _own_sum(padded.view(size, -1), group)[0].clone(), group)
    return padded[: flat.numel()].view(x.shape)


def reduce_scatter_in_tree(x: Tensor, group: Group) -> Tensor:
    """Return this rank's part along dim 0 of the tree's sum of ``x`` over the group."""
    size = group.size()
    if size == 1:
        return x
    if size > 2:
        return _own_sum(x.reshape(size, -1, *x.shape[1:]), group)[0]
    x = x.contiguous()
    share = x.new_empty((x.shape[0] // size, *x.shape[1:]))
    collectives.reduce_scatter_flat_(share, x, group)
    return share


def _own_sum(by_rank: Tensor, group: Group) -> Tensor:
    """``[size, ...]``, the parts for each rank -> ``[1, ...]``, the tree's sum of this rank's part; the messages are
    as large as those of a reduce-scatter."""
    ones = [1] * group.size()
    return tree_sum(collectives.all_to_all_rows(by_rank.contiguous(), ones, ones, group).split(1), Tensor.add_)


collectives.COLLECTIVES.update(sum_in_tree=all_reduce_in_tree, reduce_scatter_first_in_tree=reduce_scatter_in_tree)


def invariant_reduce_from_region(x: Tensor, group: Group) -> Tensor:
    """``collectives.reduce_from_region`` in the order of the tree."""
    return collectives.paired(x, group, "sum_in_tree", "identity")


def invariant_reduce_scatter_to_sequence(x: Tensor, group: Group) -> Tensor:
    """``collectives.reduce_scatter_to_sequence`` in the order of the tree."""
    return collectives.paired(x, group, "reduce_scatter_first_in_tree", "gather_first")
