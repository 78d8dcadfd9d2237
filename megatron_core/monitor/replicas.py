"""Copies of parameters that must be equal to the bit, compared by their hashes.

What is compared: every parameter over dp-cp; over tp the parameters that each rank holds whole, and the rows that
several ranks share (keys and values, where there are fewer groups of them than ranks); the tied embedding over the
first and the last pipeline rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron_core.monitor.bit_hash import hash_tensors
from megatron_core.parallel.collectives import all_reduce_
from megatron_core.parallel.groups import Group, ParallelGroups
from megatron_core.parallel.sharding import Range, spec_of
from megatron_core.parallel.texts import gather_texts, listed

WORLD = "tp-cp-ep-dp-pp"


@dataclass(frozen=True)
class Axis:
    """What one group of ranks compares; ``names`` and their order are the same on all of its ranks."""

    label: str
    group: Group
    first_rank: int
    """The lowest global rank of the group, which tells it from the other groups over the same axis."""
    names: list[str]
    places: list[int | None]
    """Where in the list of hashes each name's is; None if this rank holds no copy."""

    def differing(self, hashes: Tensor) -> Tensor:
        """Which of ``names`` have unequal copies in the group, ``[n]`` bool, the same on all ranks of the group.

        One all-reduce: with the maximum of h and of ~h, the largest and the smallest hash are known.
        """
        held = torch.tensor([place is not None for place in self.places], device=hashes.device)
        mine = hashes[torch.tensor([place or 0 for place in self.places], device=hashes.device)]
        extremes = torch.stack([mine, ~mine]).masked_fill_(~held, torch.iinfo(torch.int64).min)
        all_reduce_(extremes, self.group, maximum=True)
        return extremes[0] != ~extremes[1]


class Replicas:
    """The copies among this rank's ``named`` parameters, and their comparison."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], groups: ParallelGroups, device: torch.device) -> None:
        self.named, self.groups, self.device = list(named), groups, device
        self.shared_rows: list[tuple[nn.Parameter, Range]] = []
        self.axes = [axis for axis in self._axes() if axis.names and axis.group.size() > 1]

    def hashes(self) -> Tensor:
        """Hashes of all parameters, in the order of ``named``, and then of the rows that are shared."""
        rows = [parameter[first:last] for parameter, (first, last) in self.shared_rows]
        return hash_tensors([parameter for _, parameter in self.named] + rows, self.device)

    def differences(self, hashes: Tensor) -> list[str]:
        """Which copies differ, in words; empty if none. All ranks of the job call this together and learn the same."""
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
        names, groups = [name for name, _ in self.named], self.groups
        yield Axis("dp-cp", groups.group("dp-cp"), groups.ranks("dp-cp")[0], names, list(range(len(names))))
        copies = list(self._copies_over_tp())
        yield Axis("tp", groups.group("tp"), groups.ranks("tp")[0], [n for n, _ in copies], [p for _, p in copies])
        tied = [place for place, (_, parameter) in enumerate(self.named) if spec_of(parameter).tied]
        if tied:
            ends = groups.embedding_ranks
            yield Axis("embedding (first and last stage)", groups.embedding, ends[0], [names[i] for i in tied], tied)

    def _copies_over_tp(self) -> Iterator[tuple[str, int | None]]:
        for place, (name, parameter) in enumerate(self.named):
            spec = spec_of(parameter)
            if spec.dim is None:
                yield name, place
            pieces = [piece for held in spec.ranges for piece in held]
            mine = {piece: local for local, piece in spec.shared_local()}
            for piece in sorted({piece for piece in pieces if pieces.count(piece) > 1}):
                where = None
                if piece in mine:
                    where = len(self.named) + len(self.shared_rows)
                    self.shared_rows.append((parameter, mine[piece]))
                yield f"{name} rows {piece[0]} to {piece[1] - 1}", where


def _report(axis: Axis, differs: list[bool], hashes: list[int]) -> Iterator[str]:
    """A line for each copy of this rank that is not like all others."""
    for name, place, unequal in zip(axis.names, axis.places, differs, strict=True):
        if unequal and place is not None:
            yield f"{axis.label}\t{name}\t{axis.first_rank}\t{hashes[place]}"


def describe(reports: dict[int, list[str]]) -> list[str]:
    """All ranks' lines as phrases: which parameters differ, over which axis, and which ranks are the odd ones."""
    holders: dict[tuple[str, str, str], dict[str, list[int]]] = {}
    for rank, lines in reports.items():
        for line in lines:
            axis, name, first_rank, value = line.split("\t")
            holders.setdefault((axis, name, first_rank), {}).setdefault(value, []).append(rank)
    names_by_fault: dict[tuple[str, str], list[str]] = {}
    for (axis, name, _), ranks_by_value in holders.items():
        names_by_fault.setdefault((axis, _odd_ones(list(ranks_by_value.values()))), []).append(name)
    return [f"{listed(names, 4)} over {axis}: {odd}" for (axis, odd), names in names_by_fault.items()]


def _odd_ones(parties: list[list[int]]) -> str:
    """Who differs from the largest party; of equal parties the one with the lowest rank counts as the largest."""
    most = max(parties, key=lambda ranks: (len(ranks), -ranks[0]))
    odd = sorted(rank for ranks in parties if ranks is not most for rank in ranks)
    return f"{_ranks(odd)} {'differs' if len(odd) == 1 else 'differ'} from {_ranks(most)}"


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {listed(ranks)}"
