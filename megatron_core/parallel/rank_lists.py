"""Megatron Core's functions that list the ranks of process groups."""

from collections.abc import Sequence
from itertools import product
from math import prod

from megatron_core.errors import LayoutError
from megatron_core.parallel.grid import DEFAULT_ORDER


def generate_masked_orthogonal_rank_groups(
    world_size: int, parallel_size: Sequence[int], mask: Sequence[bool]
) -> list[list[int]]:
    """Groups of ranks that differ only on the axes whose ``mask`` is True; ``parallel_size`` lists sizes, fastest
    first.

    Name and arguments are Megatron Core's.
    """
    strides = [prod(parallel_size[:axis]) for axis in range(len(parallel_size))]
    steps = [range(0, size * stride, stride) for size, stride in zip(parallel_size, strides, strict=True)]
    inner = [step for step, varies in zip(steps, mask, strict=True) if varies]
    outer = [step for step, varies in zip(steps, mask, strict=True) if not varies]
    outer.append(range(0, world_size, prod(parallel_size)))
    offsets = sorted(map(sum, product(*inner)))
    return [[first + offset for offset in offsets] for first in sorted(map(sum, product(*outer)))]


class RankGenerator:
    """Megatron Core's generator for one view of the ranks: ``get_ranks("tp-dp")`` lists the groups over those axes.

    With ``cp`` > 1 it is the view of dense layers, with ``ep`` > 1 that of experts; ``tp`` and ``dp`` are sizes in that
    view.
    """

    def __init__(
        self, tp: int, ep: int, dp: int, pp: int, cp: int, order: str = DEFAULT_ORDER, rank_offset: int = 0
    ) -> None:
        assert ep == 1 or cp == 1, f"ep={ep} and cp={cp} are axes of different views; one of them must be 1"
        sizes = {"tp": tp, "cp": cp, "ep": ep, "dp": dp, "pp": pp}
        self.rank_offset, self.world_size = rank_offset, prod(sizes.values())
        named = order.lower().split("-")
        for axis in sizes.keys() - set(named):
            if sizes[axis] != 1:
                raise LayoutError(f"order={order!r} lacks {axis!r}, whose size is {sizes[axis]}; add it")
        self.order = [*named, *(axis for axis in sizes if axis not in named)]
        self._sizes = [sizes[axis] for axis in self.order]

    def get_ranks(self, token: str) -> list[list[int]]:
        """Groups of ranks that differ only on the axes in ``token``."""
        mask = [axis in token.split("-") for axis in self.order]
        found = generate_masked_orthogonal_rank_groups(self.world_size, self._sizes, mask)
        return [[self.rank_offset + rank for rank in ranks] for ranks in found]
