"""Copies of the state in host memory: where they are found after a failure, and their mirrors."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from megatron_core.checkpoint.host_copy import LocalCopy
from megatron_core.parallel import interrupt
from megatron_core.parallel.recovery.keeper import Connection, RemoteCopy
from megatron_core.parallel.recovery.meeting import Meeting, Members
from megatron_core.parallel.recovery.memory import MIRRORED, MIRRORS, Copy, HostMemory

POLL = 0.001
"""Seconds between checks whether a mirror is complete."""


def sources_of(
    members: Members, meeting: Meeting, memory: HostMemory, mirror: HostMemory | None
) -> list[LocalCopy | RemoteCopy]:
    """The copies to load: this rank's own one in the same layout, otherwise all, those in this host's memory first.

    The own copy becomes the only one in ``memory``. ``mirror`` has copies of another rank.
    """
    copies = [Copy(owner, members.iteration, members.written) for owner in members.holders]
    own = next((copy for copy in memory.copies() if copy in copies), None)
    writers = meeting.decided(members.written)
    if own is not None:
        memory.choose(own)
        if writers is not None and writers.training == members.training:
            return [LocalCopy(memory, own)]
    mirrored = [] if mirror is None else mirror.copies()
    found = [LocalCopy(memory, own)] if own is not None else []
    found += [LocalCopy(mirror, copy) for copy in copies if mirror is not None and copy != own and copy in mirrored]
    remote = [copy for copy in copies if copy != own and copy not in mirrored]
    remote.sort(key=lambda copy: (copy.owner - memory.rank) % meeting.size)  # different readers begin at others
    return [*found, *(_remote(meeting, members.holders[copy.owner], copy) for copy in remote)]


def _remote(meeting: Meeting, holder: int, copy: Copy) -> RemoteCopy:
    address = meeting.keeper(holder)
    assert address is not None, "a keeper starts before its rank trains"
    return RemoteCopy(Connection(address), copy)


def choose_mirror(memory: HostMemory, ranks: Sequence[int]) -> None:
    """Let the keeper read the copies of a rank on another host, or on this one if there is no other."""
    if len(ranks) > 1:
        shift = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        shift = shift if shift % len(ranks) else 1
        memory.numbers[MIRRORS] = 1 + ranks[(ranks.index(memory.rank) + shift) % len(ranks)]


def await_mirror(memory: HostMemory) -> None:
    """Wait until another rank has a mirror of the newest copy; ``InterruptedWait`` if the job fails meanwhile."""
    newest = [copy.stamp for copy in memory.copies()][-1:]
    while newest and memory.numbers[MIRRORED] < newest[0]:
        interrupt.check()
        time.sleep(POLL)
