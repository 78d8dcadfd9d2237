"""The latest collectives of ranks, as reports contain them, and the first one in which ranks differ."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megatron_core.parallel.flight_recorder import RECORDER


@dataclass(frozen=True)
class Call:
    """One collective or point-to-point message."""

    channel: str
    """Identifies a group, or a sender and its receiver; all of its ranks must make the same calls in the same order."""
    ranks: tuple[int, ...]
    number: int
    """Number of the call in its channel, from 1."""
    what: str
    shape: tuple[int, ...]
    dtype: str
    seconds: float
    """Time of the call on this host's clock."""

    def __str__(self) -> str:
        """Kind, shape and dtype of the call."""
        return f"{self.what} of {list(self.shape)} {self.dtype}"

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Call:
        """Rebuild a ``Call`` from its ``asdict`` form in JSON."""
        return cls(**{**content, "ranks": tuple(content["ranks"]), "shape": tuple(content["shape"])})


def recorded_calls() -> dict[str, Any]:
    """Counts by channel, the ranks of each channel and the latest calls of this rank, in a form that JSON can store."""
    calls = [
        asdict(Call(channel, RECORDER.ranks[channel], number, what, shape, str(dtype).removeprefix("torch."), seconds))
        for channel, number, what, shape, dtype, seconds in list(RECORDER.calls)
    ]
    return {"counts": dict(RECORDER.counts), "ranks": {k: list(v) for k, v in RECORDER.ranks.items()}, "calls": calls}


def first_differing_call(records: Mapping[int, Mapping[str, Any]]) -> str | None:
    """Describe the earliest call in which ranks differ, given the ``content`` of each rank; None if they agree."""
    channels = {name: tuple(r) for content in records.values() for name, r in content["ranks"].items()}
    differences = [_difference(name, ranks, records) for name, ranks in channels.items()]
    return min((d for d in differences if d is not None), default=(0.0, None))[1]


def _difference(
    channel: str, ranks: Sequence[int], records: Mapping[int, Mapping[str, Any]]
) -> tuple[float, str] | None:
    """Time and description of the first call in which the ranks of a channel differ; None if they agree."""
    members = {rank: records[rank] for rank in ranks if rank in records}
    calls: dict[int, dict[int, Call]] = defaultdict(dict)
    for rank, content in members.items():
        for call in (Call.of(stored) for stored in content["calls"] if stored["channel"] == channel):
            calls[call.number][rank] = call
    counts = {rank: content["counts"].get(channel, 0) for rank, content in members.items()}
    # A rank that is behind is as much a difference as another kind of call: the others wait for it.
    for number, calls_by_rank in sorted(calls.items()):
        kinds: dict[str, list[int]] = defaultdict(list)
        for rank, call in calls_by_rank.items():
            kinds[str(call)].append(rank)
        behind = [rank for rank, count in counts.items() if count < number]
        if len(kinds) == 1 and not behind:
            continue
        listing = " but ".join(f"{label} by {_named(by)}" for label, by in sorted(kinds.items()))
        missing = f", and not by {_named(behind)}, which made {min(counts[r] for r in behind)} calls" if behind else ""
        when = min(call.seconds for call in calls_by_rank.values())
        return when, f"call {number} over ranks {list(ranks)} was {listing}{missing}"
    return None


def _named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
