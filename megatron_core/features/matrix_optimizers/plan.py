"""Assign each matrix of a pipeline stage to one rank, and plan the messages between the ranks with its parts.

The plan depends only on names, sizes, ``ShardSpec``s and the grid: every rank computes the same one without a message.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from math import prod

import torch

from megatron_core.data_parallel import Bucket
from megatron_core.data_parallel.bucket_layout import matrix_work
from megatron_core.parallel.boxes import Box, flat_boxes
from megatron_core.parallel.groups import ParallelGroups
from megatron_core.parallel.sharding import ShardSpec, spec_of

STACK = 2**20
"""Elements up to which matrices of a stack (experts) form one task: products of small matrices are faster in a batch.
The batch does not depend on the layout, so that the layout does not change the bits of the products."""
ROUNDS = 4
"""Maximal number of rounds: the messages of a round are in flight during the products of another."""


@dataclass(frozen=True, eq=False)
class MatrixTask:
    """A matrix, or a stack of matrices, that one rank transforms as a whole."""

    bucket: Bucket
    number: int
    """Number of the parameter in the bucket."""
    spec: ShardSpec
    box: Box
    """The task's part of the global tensor: all of it, or some of the matrices of a stack."""

    @property
    def cost(self) -> int:
        """Relative cost of the task."""
        return matrix_work(self.box.shape)


@dataclass(frozen=True)
class TaskPiece:
    """Elements of a task that a shard holds.

    In the shard: ``shard[flat].view(shape)[inner]``; in the task: ``tensor[in_matrix]``.
    """

    flat: slice
    shape: tuple[int, ...]
    inner: tuple[slice, ...]
    in_matrix: tuple[slice, ...]
    numel: int
    owned: bool
    """Whether this is the copy, among those of the model-parallel ranks, that is sent to the owner of the task."""


@dataclass(frozen=True)
class Holding:
    """The pieces of a task in one shard, and the ranks with this shard, as indices in the stage."""

    ranks: tuple[int, ...]
    pieces: tuple[TaskPiece, ...]

    @property
    def owned(self) -> tuple[TaskPiece, ...]:
        """The pieces that are sent to the owner of the task."""
        return tuple(piece for piece in self.pieces if piece.owned)


Item = tuple[MatrixTask, TaskPiece]


@dataclass
class MatrixMessages:
    """Pieces that this rank sends and receives in one all-to-all, by rank of the stage, and the pieces it keeps."""

    send: list[list[Item]]
    receive: list[list[Item]]
    local: list[Item] = field(default_factory=list)
    is_empty: bool = True
    """Whether no rank of the stage sends anything."""

    @classmethod
    def among(cls, size: int) -> "MatrixMessages":
        """Return empty messages between ``size`` ranks."""
        return cls([[] for _ in range(size)], [[] for _ in range(size)])

    @property
    def by_rank(self) -> tuple[list[list[Item]], list[list[Item]]]:
        """The pieces to each rank, and from each rank."""
        return self.send, self.receive

    def add(self, task: MatrixTask, pieces: Sequence[TaskPiece], source: int, target: int, this_rank: int) -> None:
        """Add the pieces sent from ``source`` to ``target``; ``this_rank`` is this rank."""
        items = [(task, piece) for piece in pieces]
        self.is_empty = self.is_empty and (source == target or not items)
        if source == target:
            self.local += items if source == this_rank else []
        elif source == this_rank:
            self.send[target] += items
        elif target == this_rank:
            self.receive[source] += items


@dataclass
class Round:
    """Tasks whose parts are sent in the same all-to-alls."""

    buckets: list[Bucket]
    """Buckets with tasks in this round, all of one dtype."""
    begins: list[Bucket]
    """Buckets with their first task in this round."""
    ends: list[Bucket]
    """Buckets with their last task in this round."""
    tasks: list[MatrixTask]
    """The tasks of this rank."""
    gather: MatrixMessages
    """Parts of directions, from the shards to the owners."""
    scatter: MatrixMessages
    """Parts of results, from the owners to the shards."""


Holders = dict[tuple[tuple[int, ...], int], tuple[int, ...]]


class MatrixStage:
    """The ranks of this rank's pipeline stage, which hold parts of the same parameters."""

    def __init__(self, groups: ParallelGroups) -> None:
        self.grid = groups.grid
        self.group = groups.group("tp-dp-cp")
        self.ranks = groups.ranks("tp-dp-cp")
        self.own = self.ranks.index(groups.rank)
        self._coordinates = [self.grid.coordinates(rank) for rank in self.ranks]
        self._known: dict[tuple[tuple[str, ...], str, int], Holders] = {}

    def holdings(self, task: MatrixTask) -> Iterator[Holding]:
        """Yield the parts of ``task`` in each distinct shard."""
        bucket = task.bucket
        spec = task.spec
        size = bucket.weights.numel() // bucket.dp_group.size() if bucket.is_sharded else bucket.weights.numel()
        offset = bucket.offsets[task.number]
        numel = bucket.parameters[task.number].numel()
        for (indices, shard), ranks in self._holders(bucket, spec.split_axes).items():
            start, stop = max(shard * size - offset, 0), min((shard + 1) * size - offset, numel)
            if start < stop:
                index_of = dict(zip(spec.split_axes, indices, strict=True))
                theirs = _of_rank(spec, tuple((axis, index_of.get(axis, 0)) for axis, _ in spec.indices))
                pieces = tuple(_pieces(task.box, theirs, start, stop, offset - shard * size))
                if pieces:
                    yield Holding(ranks, pieces)

    def _holders(self, bucket: Bucket, axes: tuple[str, ...]) -> Holders:
        """Return the ranks with each part of a parameter that is split over ``axes``: (indices, shard) -> ranks."""
        replicas = "-".join(bucket.kind.replica_axes)
        shards = bucket.dp_group.size() if bucket.is_sharded else 1
        if (axes, replicas, shards) not in self._known:
            holders: Holders = {}
            for number, (rank, coordinates) in enumerate(zip(self.ranks, self._coordinates, strict=True)):
                # Instances of hybrid sharding are neighbours in the group over the data axes.
                shard = self.grid.group_of(rank, replicas).index(rank) % shards
                key = tuple(coordinates[axis] for axis in axes), shard
                holders[key] = (*holders.get(key, ()), number)
            self._known[axes, replicas, shards] = holders
        return self._known[axes, replicas, shards]


@cache
def _of_rank(spec: ShardSpec, indices: tuple[tuple[str, int], ...]) -> ShardSpec:
    return replace(spec, indices=indices, is_copy=False)


def _pieces(task: Box, spec: ShardSpec, start: int, stop: int, offset: int) -> Iterator[TaskPiece]:
    """Yield the pieces of ``task`` in the elements ``start ... stop - 1`` of a rank's tensor, which begins at
    ``offset`` in its shard.
    """
    for box, first in flat_boxes(spec.local_shape, start, stop):
        for part_of_spec in spec.parts:
            shift = tuple(a - b for a, b in zip(part_of_spec.whole.start, part_of_spec.local.start, strict=True))
            common = box.intersect(part_of_spec.local)
            global_box = None if common is None else common.shifted(shift).intersect(task)
            if global_box is not None:
                inner = global_box.shifted(tuple(-by for by in shift)).within(box)
                flat = slice(offset + first, offset + first + box.numel)
                yield TaskPiece(flat, box.shape, inner, global_box.within(task), global_box.numel, part_of_spec.owned)


def tasks_of(buckets: Sequence[Bucket]) -> list[MatrixTask]:
    """Return the tasks of ``buckets`` in order."""
    tasks = []
    for bucket in buckets:
        for number, parameter in enumerate(bucket.parameters):
            spec = spec_of(parameter)
            shape = spec.global_shape
            inner = spec.global_shape[1:]
            count = shape[0]
            if len(shape) > 2:  # a divisor, so that few stacks contain experts of several ranks
                most = max(1, STACK // prod(inner))
                count = max(n for n in range(1, shape[0] + 1) if n <= most and shape[0] % n == 0)
            for first in range(0, shape[0], count):
                box = Box((first, *(0 for _ in inner)), (min(first + count, shape[0]), *inner))
                tasks.append(MatrixTask(bucket, number, spec, box))
    return tasks


def assign_owners(tasks: Sequence[MatrixTask], holdings: Sequence[Sequence[Holding]], ranks: int) -> list[int]:
    """Return the owner of each task: the longest first, to the rank with the least work (Graham 1969).

    Without cut parameters, a task that some ranks hold as a whole goes to one of them, because it then needs no
    message. Any other task goes to the rank with most of it among the ranks that stay below 1.05 times the mean work.
    """
    costs = [task.cost for task in tasks]
    work = [0] * ranks
    owners = [0] * len(tasks)
    limit = 1.05 * sum(costs) / ranks
    for number in sorted(range(len(tasks)), key=lambda n: -costs[n]):
        elements = [0] * ranks
        for holding in holdings[number]:
            for rank in holding.ranks:
                elements[rank] += sum(piece.numel for piece in holding.owned)
        uncut = not tasks[number].bucket.cuts_parameters
        complete = [rank for rank in range(ranks) if uncut and elements[rank] == tasks[number].box.numel]
        light = [rank for rank in range(ranks) if work[rank] + costs[number] <= limit]
        order = [(-elements[rank], work[rank], rank) for rank in complete or light]
        owner = min(order)[-1] if order else work.index(min(work))
        owners[number] = owner
        work[owner] += costs[number]
    return owners


def plan_rounds(buckets: Sequence[Bucket], groups: ParallelGroups) -> list[Round]:
    """Return the rounds of this rank; a collective plan of all ranks of its stage, which have the same buckets."""
    stage = MatrixStage(groups)
    rounds = []
    size = len(stage.ranks)
    tasks = tasks_of(sorted(buckets, key=lambda bucket: str(bucket.weights.dtype)))
    holdings = [list(stage.holdings(task)) for task in tasks]
    owners = assign_owners(tasks, holdings, size)
    bounds = _bounds(tasks, size)
    for start, stop in pairwise(bounds):
        now, before, after = ({task.bucket: None for task in some} for some in (
            tasks[start:stop], tasks[:start], tasks[stop:]
        ))  # fmt: skip
        mine = [task for task, owner in zip(tasks[start:stop], owners[start:stop], strict=True) if owner == stage.own]
        begins = [b for b in now if b not in before]
        ends = [b for b in now if b not in after]
        round_ = Round(list(now), begins, ends, mine, MatrixMessages.among(size), MatrixMessages.among(size))
        for number in range(start, stop):
            _add_messages(round_, tasks[number], owners[number], holdings[number], stage)
        rounds.append(round_)
    return rounds


def _add_messages(into: Round, task: MatrixTask, owner: int, holdings: Sequence[Holding], stage: MatrixStage) -> None:
    """Add the messages with the parts of a task; of several ranks with a part, the next one after the owner sends."""
    for holding in holdings:
        sender = min(holding.ranks, key=lambda rank: (rank - owner) % len(stage.ranks))
        into.gather.add(task, holding.owned, sender, owner, stage.own)
        for rank in holding.ranks:
            into.scatter.add(task, holding.pieces, owner, rank, stage.own)


def _bounds(tasks: Sequence[MatrixTask], ranks: int) -> list[int]:
    """Return the bounds of the rounds: parts of about equal cost, each with tasks of one dtype.

    A round has enough tasks to occupy all ranks. One rank sends nothing: it takes one bucket after the other.
    """
    changes = [n for n in range(1, len(tasks)) if tasks[n].bucket is not tasks[n - 1].bucket]
    if ranks == 1:
        return [0, *changes, len(tasks)] if tasks else []
    dtypes = [torch.promote_types(task.bucket.weights.dtype, torch.float32) for task in tasks]
    bounds = {n for n in changes if dtypes[n] != dtypes[n - 1]} | {0, len(tasks)}
    count = max(1, min(ROUNDS, len(tasks) // (2 * ranks)))
    total = sum(task.cost for task in tasks)
    done = 0
    cut = 1
    for number, task in enumerate(tasks):
        if cut < count and done * count >= cut * total:
            bounds.add(number)
            cut += 1
        done += task.cost
    return sorted(bounds)
