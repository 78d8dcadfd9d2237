"""Comparison of parameter replicas, which must be equal to the bit, by hashes.

Compared are: every parameter over its data axes; over each model axis, replicated parameters and ranges shared by
several ranks (keys and values with fewer query groups than ranks); the tied embedding on the first and last stage.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor, nn

from megatron_core.parallel.collectives import all_reduce_
from megatron_core.parallel.grid import WORLD
from megatron_core.parallel.groups import Group, ParallelGroups
from megatron_core.parallel.sharding import Range, spec_of
from megatron_core.parallel.texts import gather_strings, listed
from megatron_core.reports.hash_sums import bit_hash


@dataclass(frozen=True)
class Axis:
    """Tensors compared within one group of ranks; ``names`` and their order are equal on all its ranks."""

    label: str
    group: Group
    first_rank: int
    """The lowest global rank of the group, which identifies it among the groups over the same axis."""
    names: list[str]
    positions: list[int | None]
    """Position of each name in the list of hashes; None if this rank has no copy."""

    def differing(self, hashes: Tensor) -> Tensor:
        """Whether the copies of each of ``names`` differ, ``[n]`` bool, equal on all ranks of the group.

        One all-reduce: the maxima of h and of ~h give the largest and the smallest hash.
        """
        is_held = torch.tensor([position is not None for position in self.positions], device=hashes.device)
        mine = hashes[torch.tensor([position or 0 for position in self.positions], device=hashes.device)]
        extremes = torch.stack([mine, ~mine]).masked_fill_(~is_held, torch.iinfo(torch.int64).min)
        all_reduce_(extremes, self.group, maximum=True)
        return extremes[0] != ~extremes[1]


class Replicas:
    """Compares the replicas among this rank's ``named`` parameters."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], groups: ParallelGroups, device: torch.device) -> None:
        self.named = list(named)
        self.groups = groups
        self.device = device
        self.shared: list[tuple[nn.Parameter, int, Range]] = []
        """Parameter, dimension and local range of each range shared with other ranks."""
        self.axes = [axis for axis in self._axes() if axis.names and axis.group.size() > 1]

    def hashes(self, reading: Callable[[Iterable[nn.Parameter]], Iterator[nn.Parameter]] = iter) -> Tensor:
        """Hashes of all parameters in the order of ``named``, followed by the shared ranges.

        ``reading`` yields each parameter while its weights are gathered.
        """
        tensors = (parameter.detach() for parameter in reading([parameter for _, parameter in self.named]))
        holders = reading([parameter for parameter, _, _ in self.shared])
        cut = (p.detach().narrow(dim, a, b - a) for p, (_, dim, (a, b)) in zip(holders, self.shared, strict=True))
        hashes = [bit_hash(tensor) for tensor in chain(tensors, cut)]
        return torch.stack(hashes) if hashes else torch.zeros(0, dtype=torch.int64, device=self.device)

    def differences(self, hashes: Tensor) -> list[str]:
        """Describe each set of differing replicas; all ranks call this and get the same list."""
        by_axis = [(axis, axis.differing(hashes)) for axis in self.axes]
        total = torch.zeros((), dtype=torch.int64, device=self.device)
        for _, differs in by_axis:
            total += differs.sum()
        world = self.groups.group(WORLD)
        all_reduce_(total, world)
        if total.item() == 0:
            return []
        lines = [line for axis, differs in by_axis for line in _report(axis, differs.tolist(), hashes.tolist())]
        return describe_replicas(dict(zip(self.groups.ranks(WORLD), self._exchange(lines), strict=True)))

    def _exchange(self, lines: list[str]) -> list[list[str]]:
        texts = gather_strings("\n".join(lines), self.groups.group(WORLD), self.device)
        return [text.splitlines() for text in texts]

    def _axes(self) -> Iterator[Axis]:
        specs = [spec_of(parameter) for _, parameter in self.named]
        for axes in dict.fromkeys(spec.replica_axes for spec in specs):
            yield self._axis(
                "-".join(axes), [(self.named[i][0], i) for i, s in enumerate(specs) if s.replica_axes == axes]
            )
        for axis in dict.fromkeys(axis for spec in specs for axis, _ in spec.indices):
            yield self._axis(axis, list(self._copies_over(axis)))
        for ranks in sorted({spec.tied for spec in specs if spec.tied}):
            tied = [(self.named[i][0], i) for i, spec in enumerate(specs) if spec.tied == ranks]
            ends = ranks == self.groups.ends
            label = "embedding (first and last stage)" if ends else f"tied weights of pipeline ranks {listed(ranks)}"
            first = self.groups.ranks("pp")[ranks[0]]
            yield Axis(
                label, self.groups.tied(ranks), first, [name for name, _ in tied], [position for _, position in tied]
            )

    def _axis(self, axes: str, copies: list[tuple[str, int | None]]) -> Axis:
        names = [name for name, _ in copies]
        positions = [position for _, position in copies]
        return Axis(axes, self.groups.group(axes), self.groups.ranks(axes)[0], names, positions)

    def _copies_over(self, axis: str) -> Iterator[tuple[str, int | None]]:
        """Replicated tensors of a model axis, and shared ranges of split tensors."""
        for position, (name, parameter) in enumerate(self.named):
            spec = spec_of(parameter)
            if axis in spec.copied_axes:
                yield name, position
            for split in (split for split in spec.splits if split.axis == axis):
                mine = {global_range: local for local, global_range in spec.shared_ranges(split)}
                for piece in spec.all_shared_ranges(split):
                    where = None
                    if piece in mine:
                        where = len(self.named) + len(self.shared)
                        self.shared.append((parameter, split.dim, mine[piece]))
                    yield f"{name} {'rows' if split.dim == 0 else 'columns'} {piece[0]} to {piece[1] - 1}", where


def _report(axis: Axis, differs: list[bool], hashes: list[int]) -> Iterator[str]:
    """Yield a line for each differing replica of this rank."""
    for name, position, unequal in zip(axis.names, axis.positions, differs, strict=True):
        if unequal and position is not None:
            yield f"{axis.label}\t{name}\t{axis.first_rank}\t{hashes[position]}"


def describe_replicas(reports: dict[int, list[str]]) -> list[str]:
    """Describe the lines of all ranks: differing parameters, axis and ranks."""
    holders: dict[tuple[str, str, str], dict[str, list[int]]] = {}
    for rank, lines in reports.items():
        for line in lines:
            axis, name, first_rank, value = line.split("\t")
            holders.setdefault((axis, name, first_rank), {}).setdefault(value, []).append(rank)
    names_by_fault: dict[tuple[str, str], list[str]] = {}
    for (axis, name, _), ranks_by_value in holders.items():
        names_by_fault.setdefault((axis, _minority(list(ranks_by_value.values()))), []).append(name)
    return [f"{listed(names, 4)} over {axis}: {odd}" for (axis, odd), names in names_by_fault.items()]


def _minority(sets: list[list[int]]) -> str:
    """Describe the ranks outside the largest set of equal ranks (for a tie, the set with the lowest rank)."""
    most = max(sets, key=lambda ranks: (len(ranks), -ranks[0]))
    odd = sorted(rank for ranks in sets if ranks is not most for rank in ranks)
    return f"{_ranks(odd)} {'differs' if len(odd) == 1 else 'differ'} from {_ranks(most)}"


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {listed(ranks)}"
