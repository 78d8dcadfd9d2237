"""Process groups over the axes of a grid."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from megatron_core.errors import LayoutError
from megatron_core.parallel.grid import WORLD, Grid

# Every combination of axes that a collective of this framework runs over or that a getter of Megatron Core returns.
COMBINATIONS = (
    *("tp", "cp", "dp", "pp", "dp-cp", "tp-pp", "tp-dp", "tp-cp", "tp-dp-cp", WORLD),
    *("etp", "ep", "edp", "etp-ep", "etp-ep-pp"),
)


@dataclass(frozen=True)
class LocalGroup:
    """Size and index of a group without a communicator.

    In a process without torch.distributed: a process that is alone, whose collectives return their input, or one that
    only computes what a rank of a larger world would hold.
    """

    num_ranks: int = 1
    index: int = 0

    def size(self) -> int:
        """Ranks of the group."""
        return self.num_ranks

    def rank(self) -> int:
        """This rank's index in it."""
        return self.index


Group = dist.ProcessGroup | LocalGroup


@dataclass(frozen=True)
class ContextGroups:
    """The ranks that share each sequence: all of them, and the same in two levels.

    ``heads`` are ``a2a`` neighbours, among which heads are exchanged; ``ring`` the ranks with the same index in their
    ``heads``, around which keys and values travel. rank of ``whole`` = rank of ``heads`` + ``heads.size()`` x rank of
    ``ring``.
    """

    whole: Group = LocalGroup()
    heads: Group = LocalGroup()
    ring: Group = LocalGroup()


ALONE = LocalGroup()
WHOLE_SEQUENCES = ContextGroups()
"""Without context parallelism."""


def process_group(group: Group) -> dist.ProcessGroup:
    """The group as torch.distributed's; ``LayoutError`` for one without a communicator."""
    if isinstance(group, LocalGroup):
        raise LayoutError(f"a group of {group.size()} ranks outside torch.distributed cannot send; start it first")
    return group


class ParallelGroups:
    """The process groups that one rank belongs to, for both views of the ranks.

    ``group(axes)`` is the group of the ranks that differ from this one only on ``axes``; combinations with the same
    ranks share one communicator. ``context`` has the context-parallel ones, also on two levels, the lower one of
    ``a2a_size`` ranks. Two more: ``embedding``, the pipeline ranks ``ends`` of the first and the last stage,
    which both hold a tied embedding; and ``reverse_pp``, a second group over the pipeline ranks: messages up and down
    the pipeline never share a communicator, so they cannot block each other.

    Without torch.distributed every group is a ``LocalGroup`` of the size that the grid says.
    """

    def __init__(
        self,
        grid: Grid,
        rank: int,
        *,
        ends: tuple[int, int] = (0, -1),
        instances: int = 1,
        a2a_size: int = 1,
        timeout: timedelta = timedelta(minutes=10),
    ) -> None:
        self.grid = grid
        self.rank = rank
        self.coordinates = grid.coordinates(rank)
        self._timeout = timeout
        self._made: dict[tuple[int, ...], Group] = {}
        self._groups = {frozenset(axes.split("-")): self._whole_group(axes) for axes in COMBINATIONS}
        tied = _ends(self.ranks("pp"), ends)
        self.embedding_ranks = list(tied) if rank in tied else []
        self.embedding = self._own_group("pp", lambda pipeline: [list(_ends(pipeline, ends))])
        # State of copies over dp and cp is sharded over both, so that dp alone need not be divisible.
        sharding = ("dp-cp", "edp") if len(self.ranks("dp")) % instances else ("dp", "dp-cp", "edp")
        self._sharding = {axes: self._split_group(axes, instances) for axes in sharding}
        self.pipeline_connected = False
        """Whether messages have passed over every pipeline link, see ``pipeline_parallel.p2p``."""
        self.context = ContextGroups(self.group("cp"), *self._levels("cp", a2a_size))
        self._made.clear()
        self.reverse_pp = self._whole_group("pp") if grid.pp > 1 else self.group("pp")

    @classmethod
    def single(cls) -> ParallelGroups:
        """The groups of a process that stands alone."""
        return cls(Grid(), 0)

    def group(self, axes: str) -> Group:
        """The group over ``axes``, one of ``COMBINATIONS`` in any order of its names."""
        try:
            return self._groups[frozenset(axes.split("-"))]
        except KeyError:
            raise LayoutError(f"no group over the axes {axes!r}; there are: {', '.join(COMBINATIONS)}") from None

    def shard_group(self, axes: str) -> Group:
        """The ranks among which optimizer state of copies over the data axes ``axes`` is sharded: with several
        instances (hybrid sharding) one of as many runs of neighbours, else all of them."""
        return self._sharded(axes)[0]

    def instance_group(self, axes: str) -> Group:
        """The ranks of all instances that hold the same shard."""
        return self._sharded(axes)[1]

    def _sharded(self, axes: str) -> tuple[Group, Group]:
        try:
            return self._sharding["-".join(sorted(axes.split("-"), reverse=True))]
        except KeyError:
            raise LayoutError(f"nothing is sharded over {axes!r}; there are: {', '.join(self._sharding)}") from None

    def size(self, axis: str) -> int:
        """Ranks along ``axis``."""
        return self.grid.size(axis)

    def index(self, axis: str) -> int:
        """This rank's index on ``axis``."""
        return self.coordinates[axis]

    def ranks(self, axes: str) -> list[int]:
        """Global ranks of the group over ``axes``."""
        return self.grid.group_of(self.rank, axes)

    @property
    def prefix(self) -> str:
        """How this rank's messages begin, as ``[pp1 dp0 tp1]``."""
        context = f" cp{self.index('cp')}" if self.size("cp") > 1 else ""
        return f"[pp{self.index('pp')} dp{self.index('dp')}{context} tp{self.index('tp')}]"

    def _whole_group(self, axes: str) -> Group:
        group = self._own_group(axes)
        assert group is not None, "every rank is in one group over any axes"
        return group

    def _own_group(
        self, axes: str, parts: Callable[[list[int]], list[list[int]]] = lambda ranks: [ranks]
    ) -> Group | None:
        """This rank's group over ``axes``, or over those of its ``parts`` that it is in; None if it is in none.

        With torch.distributed every group of the world is made, because all processes must do so together; groups of
        another world, such as those of a rank that stands alone in a job, are of this process only.
        """
        mine = None
        distributed = dist.is_initialized() and dist.get_world_size() == self.grid.world_size
        for ranks in self.grid.groups(axes) if distributed else [self.ranks(axes)]:
            for members in map(tuple, parts(ranks)):
                if distributed and members not in self._made:
                    self._made[members] = dist.new_group(list(members), timeout=self._timeout)
                if self.rank in members:
                    mine = self._made.get(members) or LocalGroup(len(members), members.index(self.rank))
        return mine

    def _split_group(self, axes: str, instances: int) -> tuple[Group, Group]:
        """This rank's group over its instance of ``axes`` and that over the same index of all instances."""
        if instances == 1:
            return self.group(axes), LocalGroup()
        size = len(self.ranks(axes))
        if size % instances:
            raise LayoutError(
                f"num_distributed_optimizer_instances={instances} cannot split the {size} ranks over {axes}; choose a "
                "divisor of them"
            )
        return self._levels(axes, size // instances)

    def _levels(self, axes: str, part: int) -> tuple[Group, Group]:
        """This rank's group of ``part`` neighbours over ``axes``, and that of the ranks with its index among theirs."""
        size = len(self.ranks(axes))
        inner = self._own_group(axes, lambda ranks: [ranks[i : i + part] for i in range(0, size, part)])
        outer = self._own_group(axes, lambda ranks: [ranks[i::part] for i in range(part)])
        assert inner is not None and outer is not None, "every rank is in one of each"
        return inner, outer


def _ends(pipeline: list[int], ends: tuple[int, int]) -> tuple[int, ...]:
    """The ranks at the indices ``ends`` of a pipeline, each once."""
    return tuple(sorted({pipeline[end] for end in ends}))
