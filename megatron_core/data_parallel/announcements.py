"""Identity of collectives: each rank announces what it is about to sum or gather, and the ranks compare it.

A collective of torch.distributed has no name. If two ranks run different units of a model, the sum of one layer's
gradients meets the sum of another layer's: with equal sizes the result is silently wrong, with unequal sizes some
transports abort and others wait. An announcement is an all-reduce of two integers over a group of its own, so it
neither depends on the transport of the collective nor on its size, and it meets only other announcements.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from typing import Any

import torch
import torch.distributed as dist

from megatron_core.errors import LayoutError
from megatron_core.parallel.flight_recorder import RECORDER
from megatron_core.parallel.groups import Group, process_group
from megatron_core.parallel.texts import gather_strings, listed

AHEAD = 8
"""Upper bound on the number of announcements that a rank has made and not yet compared."""


class Announcement:
    """One announcement; ``wait`` compares it with those of the other ranks."""

    def __init__(self, what: str, number: int, values: torch.Tensor, work: Any, compare: Callable[[int], None]) -> None:
        self.what, self.number = what, number
        self._values, self._work, self._compare = values, work, compare

    def wait(self) -> None:
        """Wait for the other ranks; ``LayoutError`` on all of them if this or an earlier announcement differs."""
        self._compare(self.number)

    def is_equal(self) -> bool:
        """Wait for the other ranks, and return whether all have announced the same."""
        self._work.wait()
        highest, lowest = self._values.tolist()
        return bool(highest == -lowest)


class Announcements:
    """The announcements of one rank over ``group``, which is used for nothing else."""

    def __init__(self, group: Group, advice: str) -> None:
        """``advice``: the end of the error message, with the fix."""
        self.group, self._advice = group, advice
        self._pending: deque[Announcement] = deque()
        """Announcements that have not been compared, in order."""
        self._count = 0

    def announce(self, what: str, detail: Iterable[int] = ()) -> Announcement:
        """Announce a collective: ``what`` for readers ("gathers layers.0"), and a ``detail`` that must be equal, too.

        Wait for the result before the collective's own result is used.
        """
        if len(self._pending) == AHEAD:
            self._pending[0].wait()
        return self._make(what, detail)

    def _make(self, what: str, detail: Iterable[int] = ()) -> Announcement:
        code = int.from_bytes(blake2b(f"{what} {(*detail,)}".encode(), digest_size=7).digest(), "little")
        values = torch.tensor([code, -code])
        group = process_group(self.group)
        RECORDER.note(f"announcement ({what})", group, values)
        work = dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group, async_op=True)
        self._count += 1
        announcement = Announcement(what, self._count, values, work, self._compare)
        self._pending.append(announcement)
        return announcement

    def _compare(self, number: int) -> None:
        """Compare the announcements up to ``number`` in order: all ranks must fail at the same one."""
        while self._pending and self._pending[0].number <= number:
            announcement = self._pending.popleft()
            if not announcement.is_equal():
                self._fail(announcement)

    def _fail(self, announcement: Announcement) -> None:
        """Raise the error about ``announcement``, after all ranks have made the same number of announcements."""
        while self._count < announcement.number + AHEAD:
            self._make("nothing")
        while self._pending:
            self._pending.popleft().is_equal()
        texts = gather_strings(announcement.what, self.group, torch.device("cpu"))
        ranks_of: dict[str, list[int]] = defaultdict(list)
        for rank, text in zip(dist.get_process_group_ranks(process_group(self.group)), texts, strict=True):
            ranks_of[text].append(rank)
        by_rank = "; ".join(f"{_subject(ranks)} {text}" for text, ranks in ranks_of.items())
        raise LayoutError(f"the ranks do not run the same units in the same order: {by_rank}. {self._advice}")


def _subject(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"each of the ranks {listed(ranks)}"
