"""Process groups over the axes of a grid."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from megatron_core.errors import LayoutError
from megatron_core.parallel.grid import Grid

# Every combination of axes that some collective of this framework runs over.
COMBINATIONS = (
    "tp",
    "cp",
    "dp",
    "pp",
    "dp-cp",
    "tp-pp",
    "tp-dp",
    "tp-cp",
    "tp-cp-pp",
    "tp-dp-cp",
    "tp-cp-ep-dp-pp",
)


class LocalGroup:
    """A group of one rank, for a process without torch.distributed; collectives return their input."""

    def size(self) -> int:
        """1."""
        return 1

    def rank(self) -> int:
        """0."""
        return 0


Group = dist.ProcessGroup | LocalGroup


class ParallelGroups:
    """The process groups that one rank belongs to.

    ``group(axes)`` is the group of the ranks that differ from this one only on ``axes``. Two more: ``embedding``, the
    pipeline ranks ``ends`` of the first and the last stage, which both hold a tied embedding; and ``reverse_pp``, a
    second group over the pipeline ranks: messages up and down the pipeline never share a communicator, so they cannot
    block each other.
    """

    def __init__(
        self,
        grid: Grid,
        rank: int,
        *,
        ends: tuple[int, int] = (0, -1),
        timeout: timedelta = timedelta(minutes=10),
    ) -> None:
        self.grid = grid
        self.rank = rank
        self.place = grid.coordinates(rank)
        self._timeout = timeout
        self._made: dict[tuple[int, ...], Group] = {}
        self._groups = {axes: self._own_group(grid.groups(axes)) for axes in COMBINATIONS}
        pipelines = grid.groups("pp")
        tied = [sorted({ranks[end] for end in ends}) for ranks in pipelines]
        self.embedding_ranks = next((ranks for ranks in tied if rank in ranks), [])
        self.embedding = self._own_group(tied)
        self._made.clear()
        self.pipeline_connected = False
        """Whether messages have passed over every pipeline link, see ``pipeline_parallel.p2p``."""
        self.reverse_pp = self._own_group(pipelines) if grid.pp > 1 else self.group("pp")

    @classmethod
    def single(cls) -> ParallelGroups:
        """The groups of a process that stands alone."""
        return cls(Grid(), 0)

    def group(self, axes: str) -> Group:
        """The group over ``axes``, one of ``COMBINATIONS``."""
        if axes not in self._groups:
            raise LayoutError(f"no group over the axes {axes!r}; there are: {', '.join(self._groups)}")
        return self._groups[axes]

    def size(self, axis: str) -> int:
        """Ranks along ``axis``."""
        return self.grid.size(axis)

    def index(self, axis: str) -> int:
        """This rank's place on ``axis``."""
        return self.place[axis]

    def ranks(self, axes: str) -> list[int]:
        """Global ranks of the group over ``axes``."""
        return self.grid.group_of(self.rank, axes)

    @property
    def prefix(self) -> str:
        """How this rank's messages begin, as ``[pp1 dp0 tp1]``."""
        return f"[pp{self.place['pp']} dp{self.place['dp']} tp{self.place['tp']}]"

    def _own_group(self, all_ranks: list[list[int]]) -> Group | None:
        """Make every group of ``all_ranks`` (all processes must do so together) and return the one with this rank."""
        mine = None
        for ranks in all_ranks:
            group = self._make(tuple(ranks))
            if self.rank in ranks:
                mine = group
        return mine

    def _make(self, ranks: tuple[int, ...]) -> Group:
        if not dist.is_initialized():
            return LocalGroup()
        if ranks not in self._made:
            self._made[ranks] = dist.new_group(list(ranks), timeout=self._timeout)
        return self._made[ranks]
