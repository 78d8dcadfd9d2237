"""Copies of the state in host memory: where they are found after a failure, and their mirrors."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence

from megatron_core.checkpoint.host_copy import LocalCopy
from megatron_core.parallel import interrupt
from megatron_core.parallel.recovery.keeper import Connection, RemoteCopy
from megatron_core.parallel.recovery.meeting import Meeting, Members
from megatron_core.parallel.recovery.memory import MIRRORED, MIRRORS, Copy, HostMemory

POLL = 0.001
"""Seconds between checks whether a mirror is complete."""


def sources_of(
    members: Members, meeting: Meeting, memory: HostMemory, mirror: HostMemory
) -> Iterator[LocalCopy | RemoteCopy]:
    """The copies to load, as far as they are needed: this rank's own one, those in ``mirror``, and those of others.

    The own copy becomes the only one in ``memory``.
    """
    copies = [Copy(owner, members.iteration, members.written) for owner in members.holders]
    own = [copy for copy in memory.copies() if copy in copies]
    for copy in own:
        memory.choose(copy)
        yield LocalCopy(memory, copy)
    mirrored = [copy for copy in mirror.copies() if copy in copies and copy not in own]
    for copy in mirrored:
        yield LocalCopy(mirror, copy)
    remote = [copy for copy in copies if copy not in own and copy not in mirrored]
    for copy in sorted(remote, key=lambda copy: (copy.owner - memory.rank) % meeting.size):
        address = meeting.keeper(members.holders[copy.owner])
        assert address is not None, "a keeper starts before its rank trains"
        yield RemoteCopy(Connection(address), copy)


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
