"""Copies of parameters that must be equal to the bit, compared by their hashes.

What is compared: every parameter over its data axes; over each of its model axes the parameters that all ranks hold
whole, and the ranges that several ranks share (keys and values, where there are fewer groups of them than ranks); the
tied embedding over the first and the last pipeline rank.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor, nn

from megatron_core.monitor.bit_hash import hash_tensors
from megatron_core.parallel.collectives import all_reduce_
from megatron_core.parallel.grid import WORLD
from megatron_core.parallel.groups import Group, ParallelGroups
from megatron_core.parallel.sharding import Range, spec_of
from megatron_core.parallel.texts import gather_texts, listed


@dataclass(frozen=True)
class Axis:
    """What one group of ranks compares; ``names`` and their order are the same on all of its ranks."""

    label: str
    group: Group
    first_rank: int
    """The lowest global rank of the group, which identifies it among the groups over the same axis."""
    names: list[str]
    positions: list[int | None]
    """Of each name its position in the list of hashes; None if this rank holds no copy."""

    def differing(self, hashes: Tensor) -> Tensor:
        """Which of ``names`` have unequal copies in the group, ``[n]`` bool, the same on all ranks of the group.

        One all-reduce: with the maximum of h and of ~h, the largest and the smallest hash are known.
        """
        held = torch.tensor([position is not None for position in self.positions], device=hashes.device)
        mine = hashes[torch.tensor([position or 0 for position in self.positions], device=hashes.device)]
        extremes = torch.stack([mine, ~mine]).masked_fill_(~held, torch.iinfo(torch.int64).min)
        all_reduce_(extremes, self.group, maximum=True)
        return extremes[0] != ~extremes[1]


class Replicas:
    """The copies among this rank's ``named`` parameters, and their comparison."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], groups: ParallelGroups, device: torch.device) -> None:
        self.named, self.groups, self.device = list(named), groups, device
        self.shared: list[tuple[nn.Parameter, int, Range]] = []
        """Parameter, dimension and local range of what other ranks hold, too."""
        self.axes = [axis for axis in self._axes() if axis.names and axis.group.size() > 1]

    def hashes(self, reading: Callable[[Iterable[nn.Parameter]], Iterator[nn.Parameter]] = iter) -> Tensor:
        """Hashes of all parameters, in the order of ``named``, and then of the ranges that are shared.

        ``reading`` gives each parameter in turn while its weights are there.
        """
        whole = (parameter.detach() for parameter in reading([parameter for _, parameter in self.named]))
        holders = reading([parameter for parameter, _, _ in self.shared])
        cut = (p.detach().narrow(dim, a, b - a) for p, (_, dim, (a, b)) in zip(holders, self.shared, strict=True))
        return hash_tensors(chain(whole, cut), self.device)

    def differences(self, hashes: Tensor) -> list[str]:
        """A sentence for each set of copies that differ; all ranks of the job call this and get the same list."""
        found = [(axis, axis.differing(hashes)) for axis in self.axes]
        total = torch.zeros((), dtype=torch.int64, device=self.device)
        for _, differs in found:
            total += differs.sum()
        world = self.groups.group(WORLD)
        all_reduce_(total, world)
        if total.item() == 0:
            return []
        lines = [line for axis, differs in found for line in _report(axis, differs.tolist(), hashes.tolist())]
        return describe(dict(zip(self.groups.ranks(WORLD), self._exchange(lines), strict=True)))

    def _exchange(self, lines: list[str]) -> list[list[str]]:
        texts = gather_texts("\n".join(lines), self.groups.group(WORLD), self.device)
        return [text.splitlines() for text in texts]

    def _axes(self) -> Iterator[Axis]:
        specs = [spec_of(parameter) for _, parameter in self.named]
        for axes in dict.fromkeys(spec.replica_axes for spec in specs):
            yield self._axis(
                "-".join(axes), [(self.named[i][0], i) for i, s in enumerate(specs) if s.replica_axes == axes]
            )
        for axis in dict.fromkeys(axis for spec in specs for axis, _ in spec.indices):
            yield self._axis(axis, list(self._copies_over(axis)))
        tied = [(self.named[i][0], i) for i, spec in enumerate(specs) if spec.tied]
        if tied:
            label, group, ends = "embedding (first and last stage)", self.groups.embedding, self.groups.embedding_ranks
            assert group is not None, "tied weights are on the ranks of the first and the last stage"
            yield Axis(label, group, ends[0], [name for name, _ in tied], [position for _, position in tied])

    def _axis(self, axes: str, copies: list[tuple[str, int | None]]) -> Axis:
        names, positions = [name for name, _ in copies], [position for _, position in copies]
        return Axis(axes, self.groups.group(axes), self.groups.ranks(axes)[0], names, positions)

    def _copies_over(self, axis: str) -> Iterator[tuple[str, int | None]]:
        """What several ranks of a model axis hold: whole tensors, and shared ranges of split ones."""
        for position, (name, parameter) in enumerate(self.named):
            spec = spec_of(parameter)
            if axis in spec.copied_axes:
                yield name, position
            for split in (split for split in spec.splits if split.axis == axis):
                mine = {whole: local for local, whole in spec.shared_ranges(split)}
                for piece in spec.all_shared_ranges(split):
                    where = None
                    if piece in mine:
                        where = len(self.named) + len(self.shared)
                        self.shared.append((parameter, split.dim, mine[piece]))
                    yield f"{name} {'rows' if split.dim == 0 else 'columns'} {piece[0]} to {piece[1] - 1}", where


def _report(axis: Axis, differs: list[bool], hashes: list[int]) -> Iterator[str]:
    """A line for each copy of this rank that is not like all others."""
    for name, position, unequal in zip(axis.names, axis.positions, differs, strict=True):
        if unequal and position is not None:
            yield f"{axis.label}\t{name}\t{axis.first_rank}\t{hashes[position]}"


def describe(reports: dict[int, list[str]]) -> list[str]:
    """All ranks' lines as sentences: which parameters differ, over which axis, and on which ranks."""
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
    """The ranks that differ from the largest set of equal ones (of two such sets, that with the lowest rank)."""
    most = max(sets, key=lambda ranks: (len(ranks), -ranks[0]))
    odd = sorted(rank for ranks in sets if ranks is not most for rank in ranks)
    return f"{_ranks(odd)} {'differs' if len(odd) == 1 else 'differ'} from {_ranks(most)}"


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {listed(ranks)}"
