"""Process groups over the axes of a grid."""

import copyreg
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import NoReturn

import torch.distributed as dist

from megatron_core.errors import LayoutError
from megatron_core.parallel.grid import WORLD, Grid

# All combinations of axes over which this framework runs collectives or Megatron Core has a getter.
COMBINATIONS = (
    *("tp", "cp", "dp", "pp", "dp-cp", "tp-pp", "tp-dp", "tp-cp", "tp-dp-cp", WORLD),
    *("etp", "ep", "edp", "etp-ep", "etp-ep-pp"),
)
# The name is here and not with the backend, because the core tests for it without importing the satellite.
SHARED_MEMORY = "shm"
"""Name of torch.distributed's backend between CPU ranks of one machine."""


@dataclass(frozen=True)
class LocalGroup:
    """Size and index of a group without a communicator.

    Used without torch.distributed: by a single process, whose collectives return their input, or to compute what a rank
    of a larger world would store.
    """

    num_ranks: int = 1
    index: int = 0

    def size(self) -> int:
        """Number of ranks in the group."""
        return self.num_ranks

    def rank(self) -> int:
        """Index of this rank in the group."""
        return self.index


def refuse_copy(group: dist.ProcessGroup) -> NoReturn:
    """``TypeError``: copied parameters lose their ``ShardSpec``, so copies of parallel layers would train wrongly."""
    raise TypeError(
        "modules with parallel layers cannot be copied or pickled, because of their process groups; build a second "
        "module, and load the state_dict of the first one"
    )


copyreg.pickle(dist.ProcessGroup, refuse_copy)
Group = dist.ProcessGroup | LocalGroup
Ranks = tuple[int, ...]


@dataclass(frozen=True)
class ContextGroups:
    """The ranks that share each sequence, as one group and as two levels.

    ``heads``: ``a2a`` neighbouring ranks that exchange attention heads. ``ring``: the ranks with the same index in
    their ``heads``; keys and values are passed around it. rank in ``whole`` = rank in ``heads`` + ``heads.size()`` x
    rank in ``ring``.
    """

    whole: Group = LocalGroup()
    heads: Group = LocalGroup()
    ring: Group = LocalGroup()


ALONE = LocalGroup()
WHOLE_SEQUENCES = ContextGroups()
"""The groups without context parallelism."""


def process_group(group: Group) -> dist.ProcessGroup:
    """``group`` as a torch.distributed group; ``LayoutError`` if it has no communicator."""
    if isinstance(group, LocalGroup):
        raise LayoutError(f"a group of {group.size()} ranks outside torch.distributed cannot send; start it first")
    return group


class ParallelGroups:
    """The process groups of one rank, for both views of the ranks.

    ``group(axes)`` contains the ranks that differ from this one only on ``axes``. ``context`` holds the
    context-parallel groups, whose lower level has ``a2a_size`` ranks. ``embedding`` contains the pipeline ranks
    ``ends`` of the first and the last stage, which both store a tied embedding. Without torch.distributed every group
    is a ``LocalGroup``.

    With ``outer_groups`` the ranks of the job form groups of neighbours with equal layouts; ``grid`` and all groups
    above are those of this rank's group. ``outer`` contains the ranks with the same part of the model.
    """

    def __init__(
        self,
        grid: Grid,
        rank: int,
        *,
        outer_groups: int = 1,
        ends: tuple[int, int] = (0, -1),
        instances: int = 1,
        a2a_size: int = 1,
        timeout: timedelta = timedelta(minutes=10),
    ) -> None:
        self.grid = grid
        self.rank = rank
        self.coordinates = grid.coordinates(rank)
        size = grid.world_size
        self._grids = (
            [replace(grid, rank_offset=number * size) for number in range(outer_groups)] if outer_groups > 1 else [grid]
        )
        self._instances = instances
        self._timeout = timeout
        # Combinations of axes with the same ranks share one communicator.
        # NCCL allocates buffers for each communicator.
        self._made: dict[tuple[int, ...], Group] = {}
        self._groups = {frozenset(axes.split("-")): self._whole_group(axes) for axes in COMBINATIONS}
        # Negative indices count from the last rank, as those of ``ends``.
        pipeline = range(len(self.ranks("pp")))
        self.ends = tuple(sorted({pipeline[end] for end in ends}))
        """Pipeline ranks of the first and the last stage."""
        self._tied: dict[tuple[int, ...], Group | None] = {}
        self.tie([self.ends])
        self.embedding = self._tied[self.ends]
        self.embedding_ranks = [self.ranks("pp")[end] for end in self.ends] if self.embedding is not None else []
        # State replicated over dp and cp is sharded over both together, so dp alone need not be divisible.
        sharding = ("dp-cp", "edp") if len(self.ranks("dp")) % instances else ("dp", "dp-cp", "edp")
        self._sharding = {axes: self._split_group(axes, instances) for axes in sharding}
        self.pipeline_connected = False
        """Whether a message has passed over every pipeline link, see ``pipeline_parallel.p2p``."""
        self.context = ContextGroups(self.group("cp"), *self._levels("cp", a2a_size))
        # From here on groups have communicators of their own even if others have the same ranks.
        self._made.clear()
        self.links: dict[tuple[int, int], Group | None] = {}
        """Groups of the messages from one pipeline rank to another, see ``create_link_groups``."""
        # Messages up and down the pipeline use different communicators, so that they cannot block each other.
        self.reverse_pp = self._whole_group("pp") if grid.pp > 1 else self.group("pp")
        # Small messages of every step have a communicator of their own: they must not wait for exchanged weights.
        self.outer = self._outer_group()
        self.outer_reports = self._outer_group()

    @classmethod
    def single(cls) -> "ParallelGroups":
        """The groups of a single process."""
        return cls(Grid(), 0)

    def group(self, axes: str) -> Group:
        """The group over ``axes``, one of ``COMBINATIONS`` in any order of its names."""
        try:
            return self._groups[frozenset(axes.split("-"))]
        except KeyError:
            raise LayoutError(f"no group over the axes {axes!r}; there are: {', '.join(COMBINATIONS)}") from None

    def shard_group(self, axes: str) -> Group:
        """The ranks that shard the optimizer state of replicas over the data axes ``axes``.

        With several instances (hybrid sharding) these are the neighbouring ranks of one instance, else all ranks.
        """
        return self._sharded(axes)[0]

    def instance_group(self, axes: str) -> Group:
        """The ranks that hold the same shard in different instances."""
        return self._sharded(axes)[1]

    def make_neighbour_groups(self, axes: str, sizes: Iterable[int], backend: str | None = None) -> dict[int, Group]:
        """Create this rank's groups of neighbours over ``axes``, by size; all ranks of the job call it together."""
        self._made.clear()
        groups = {size: self._own_group(axes, partial(_neighbours, size=size), backend=backend) for size in sizes}
        return {size: group for size, group in groups.items() if group is not None}

    def _sharded(self, axes: str) -> tuple[Group, Group]:
        try:
            return self._sharding["-".join(sorted(axes.split("-"), reverse=True))]
        except KeyError:
            raise LayoutError(f"nothing is sharded over {axes!r}; there are: {', '.join(self._sharding)}") from None

    def size(self, axis: str) -> int:
        """Number of ranks along ``axis``."""
        return self.grid.size(axis)

    @property
    def replicas(self) -> int:
        """Number of copies of the model in the job, in all outer groups."""
        return self.size("dp") * len(self._grids)

    def index(self, axis: str) -> int:
        """Index of this rank on ``axis``."""
        return self.coordinates[axis]

    def ranks(self, axes: str) -> list[int]:
        """Global ranks of the group over ``axes``."""
        return self.grid.group_of(self.rank, axes)

    def tie(self, sets: Iterable[tuple[int, ...]]) -> None:
        """Create the groups of ``tied`` over sets of pipeline ranks; all ranks of the job call it with the same."""
        for ranks in sets:
            if ranks not in self._tied:
                self._tied[ranks] = self._own_group("pp", partial(_members, indices=ranks))

    def create_link_groups(self, links: Iterable[tuple[int, int]]) -> None:
        """Create a group for each link (sender, receiver) between pipeline ranks, if messages need one.

        All ranks of the job call it with the same links.
        """
        if not self._is_distributed or not messages_share_stream():
            return
        for link in links:
            self._made.clear()  # both directions have the same ranks
            self.links[link] = self._own_group("pp", partial(_members, indices=link))

    def tied(self, ranks: tuple[int, ...]) -> Group:
        """This rank's group over the pipeline ranks ``ranks``, which hold a tied weight."""
        group = self._tied.get(ranks)
        assert group is not None, f"tied weights are on the pipeline ranks {ranks}, and this rank is one of them"
        return group

    def named(self) -> Iterator[tuple[Group, list[str]]]:
        """Each of this rank's groups of several ranks, in one order on all ranks, with all its names.

        The names of a single axis, or those of the fewest axes.
        """
        folded = self.size("ep") > 1 or self.size("etp") != self.size("tp")
        axes = [
            combination for combination in COMBINATIONS if folded or "e" not in combination
        ]  # else the views of the ranks are equal
        listed: list[tuple[str, Group | None]] = [(combination, self.group(combination)) for combination in axes]
        listed += [(f"{combination} in its instance", self.shard_group(combination)) for combination in self._sharding]
        listed += [
            (f"{combination} between instances", self.instance_group(combination)) for combination in self._sharding
        ]
        listed += [("cp heads", self.context.heads), ("cp ring", self.context.ring)]
        listed += [(f"tied weights of pipeline ranks {ranks}", group) for ranks, group in self._tied.items()]
        listed += [("outer groups", self.outer), ("reports of outer groups", self.outer_reports)]
        names: dict[Group, list[str]] = {}
        for name, group in listed:
            if group is not None and group.size() > 1:
                names.setdefault(group, []).append(name)
        for group, names_of_group in names.items():
            fewest = min(name.count("-") + name.count(" ") for name in names_of_group)
            yield group, [name for name in names_of_group if name.count("-") + name.count(" ") == fewest]

    @property
    def prefix(self) -> str:
        """Prefix of this rank's messages, such as ``[pp1 dp0 tp1]``."""
        context = f" cp{self.index('cp')}" if self.size("cp") > 1 else ""
        outer = f"group{self.outer.rank()} " if self.outer.size() > 1 else ""
        return f"[{outer}pp{self.index('pp')} dp{self.index('dp')}{context} tp{self.index('tp')}]"

    def _whole_group(self, axes: str) -> Group:
        group = self._own_group(axes)
        assert group is not None, "every rank belongs to one group over any axes"
        return group

    def _own_group(
        self, axes: str, divide: Callable[[Ranks], list[Ranks]] = lambda ranks: [ranks], backend: str | None = None
    ) -> Group | None:
        """This rank's group over ``axes``, or, with ``divide``, over the part that contains it; None if none does.

        With torch.distributed all groups of the world are created, because every process must take part in each
        creation. Groups of another world, such as those of a single process within a job, are ``LocalGroup``s.
        """
        own_group = None
        distributed = self._is_distributed
        # All processes create all groups in the same order, as torch requires, and keep only their own.
        everyone = [ranks for grid in self._grids for ranks in grid.constant_groups(axes)] if distributed else []
        for ranks in everyone or [tuple(self.ranks(axes))]:
            for members in divide(ranks):
                if distributed and members not in self._made:
                    self._made[members] = dist.new_group(list(members), timeout=self._timeout, backend=backend)
                if self.rank in members:
                    own_group = self._made.get(members) or LocalGroup(len(members), members.index(self.rank))
        return own_group

    @property
    def _is_distributed(self) -> bool:
        """Whether torch.distributed's world is that of the grids."""
        return dist.is_initialized() and dist.get_world_size() == self.grid.world_size * len(self._grids)

    def _outer_group(self) -> Group:
        """This rank's group over the outer groups, with a communicator of its own."""
        number = len(self._grids)
        size = self.grid.world_size
        # A plan of one rank of a larger job has sizes and indices without communicators.
        if number == 1 or not self._is_distributed:
            return LocalGroup(number, self.grid.rank_offset // size if number > 1 else 0)
        groups = [
            dist.new_group([first + index * size for index in range(number)], timeout=self._timeout)
            for first in range(size)
        ]
        return groups[self.rank % size]

    def _split_group(self, axes: str, instances: int) -> tuple[Group, Group]:
        """This rank's group within its instance of ``axes``, and the group of the same index in all instances."""
        if instances == 1:
            return self.group(axes), LocalGroup()
        size = len(self.ranks(axes))
        if size % instances:
            raise LayoutError(
                f"num_distributed_optimizer_instances={instances} cannot split the {size} ranks over {axes}; choose a "
                "divisor of them"
            )
        return self._levels(axes, size // instances)

    def _levels(self, axes: str, size: int) -> tuple[Group, Group]:
        """This rank's group of ``size`` neighbours over ``axes``, and the group of the same index in all such
        groups."""
        inner = self._own_group(axes, partial(_neighbours, size=size))
        outer = self._own_group(axes, lambda ranks: [ranks[i::size] for i in range(size)])
        assert inner is not None and outer is not None, "every rank belongs to one group of each level"
        return inner, outer


def messages_share_stream() -> bool:
    """Whether all messages of a group use one communicator and one stream, so that a receive blocks later sends."""
    # NCCL has a communicator for each pair of ranks, unless ``init_process_group`` was called with ``device_id``: then
    # torch uses the communicator of the whole group (``ProcessGroupNCCL::pointToPoint``).
    is_bound = getattr(dist.group.WORLD, "bound_device_id", None) is not None
    return is_bound and dist.get_backend() == "nccl"


def _neighbours(ranks: Ranks, size: int) -> list[Ranks]:
    """Divide ``ranks`` into groups of ``size`` neighbours."""
    return [ranks[start : start + size] for start in range(0, len(ranks), size)]


def _members(pipeline: Ranks, indices: tuple[int, ...]) -> list[Ranks]:
    """Return one group, of the ranks at ``indices`` of a pipeline."""
    return [tuple(pipeline[index] for index in indices)]
