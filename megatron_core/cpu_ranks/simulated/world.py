"""The threads of a simulated world, and what torch.distributed knows of each of its ranks."""

import ctypes
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextvars import Context
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_core.cpu_ranks.simulated import report
from megatron_core.cpu_ranks.simulated.group import SimulatedGroup
from megatron_core.cpu_ranks.simulated.meeting import Channel, ChannelKey, Elsewhere
from megatron_core.cpu_ranks.simulated.scheduler import Arrivals, TurnScheduler
from megatron_core.errors import MegatronError
from megatron_core.parallel.rank_local import Forwarding, RankLocal, new_rank

BACKEND = "simulated"
STACK = 1 << 20
"""Bytes of each thread's stack, of which only the pages in use take memory."""


class WorldError(MegatronError):
    """A rank failed, or all ranks wait for each other; the last line of the message is the reason."""


class TorchWorld:
    """The groups of one rank, as torch.distributed's functions read them (``distributed_c10d._World``)."""

    def __init__(self) -> None:
        self.default_pg: Any = None
        self.pg_map: dict[Any, tuple[str, None]] = {}
        self.pg_names: dict[Any, str] = {}
        self.pg_group_ranks: dict[Any, dict[int, int]] = {}
        self.pg_backend_config: dict[Any, str] = {}
        self.pg_coalesce_state: dict[Any, list[Any]] = {}
        self.tags_to_pg: dict[str, list[Any]] = {}
        self.pg_to_tag: dict[Any, str] = {}
        self.group_count = 0
        self.comms: list[Any] = []

    def add(self, group: SimulatedGroup) -> None:
        """Make a group known."""
        self.pg_map[group] = (BACKEND, None)
        self.pg_backend_config[group] = BACKEND
        self.pg_names[group] = f"simulated {self.group_count}"
        self.pg_group_ranks[group] = {rank: index for index, rank in enumerate(group.channel.ranks)}
        self.group_count += 1


_OF_THE_PROCESS = distributed_c10d._world, dist.new_group
_TORCH_WORLD: RankLocal[Any] = RankLocal(lambda: _OF_THE_PROCESS[0])
_NEW_GROUP: RankLocal[Callable[..., Any]] = RankLocal(lambda: _OF_THE_PROCESS[1])


class OtherProcesses(Elsewhere, Arrivals, Protocol):
    """The other processes of a divided world."""

    def open(self, world: "SimulatedWorld") -> None:
        """Deliver to the channels of ``world`` from now on."""


class SimulatedWorld:
    """Runs a function on the ``ranks`` of this process, each in a thread of its own; make one for each run."""

    def __init__(self, size: int, ranks: Sequence[int], processes: OtherProcesses) -> None:
        self.size = size
        self._ranks = ranks
        self._others = processes
        self._scheduler = TurnScheduler(processes)
        self._channels: dict[ChannelKey, Channel] = {}
        self._contexts: dict[int, Context] = {}
        self._results: dict[int, Any] = {}
        self._ended = threading.Event()
        self._failure = ""

    def run(self, function: Callable[[], Any], timeout: float | None) -> dict[int, Any]:
        """Call ``function()`` on every rank of this process and return the results by rank.

        The process must end afterwards if this raises, because the other ranks' threads sleep forever. Errors:
        ``WorldError`` for the first rank that raises, and after ``timeout`` seconds.
        """
        _divide_torch()
        _share_free_memory()
        torch.set_num_threads(1)
        self._others.open(self)
        before = threading.stack_size(STACK)
        try:
            for rank in self._ranks:
                turn = self._scheduler.add()
                self._contexts[rank] = new_rank()
                arguments = (self._contexts[rank].run, self._run_rank, rank, turn, function)
                threading.Thread(target=lambda call, *values: call(*values), args=arguments, daemon=True).start()
        finally:
            threading.stack_size(before)
        self._scheduler.pass_on()
        if not self._ended.wait(timeout):
            ranks = len(self._ranks)
            left = len(self._ranks) - len(self._results)
            raise WorldError(
                f"{left} of {ranks} ranks did not finish within timeout={timeout} s; give a longer one, or None"
            )
        if self._failure:
            raise WorldError(self._failure)
        return self._results

    def _run_rank(self, rank: int, turn: threading.Lock, function: Callable[[], Any]) -> None:
        turn.acquire()
        try:
            self._join(rank)
            self._results[rank] = function()
        except BaseException as error:  # reported to the caller of ``run``
            self.end(report.failure(rank, error, self._contexts[rank]))
            return
        if len(self._results) == len(self._ranks):
            self._ended.set()
        self._scheduler.pass_on()

    def _join(self, rank: int) -> None:
        """Make this thread a rank."""
        world = TorchWorld()
        _TORCH_WORLD.set(world)
        numbers: dict[tuple[int, ...], int] = defaultdict(int)

        def new_group(ranks: list[int] | None = None, **_: Any) -> Any:
            if ranks and rank not in ranks:
                return dist.GroupMember.NON_GROUP_MEMBER
            members = tuple(sorted(ranks)) if ranks else tuple(range(self.size))
            key = members, numbers[members]
            numbers[members] += 1
            group = SimulatedGroup(self.channel(key), members.index(rank))
            world.add(group)
            return group

        _NEW_GROUP.set(new_group)
        world.default_pg = new_group()

    def channel(self, key: ChannelKey) -> Channel:
        """The channel of a group."""
        if key not in self._channels:
            self._channels[key] = Channel(key, self._scheduler, self._others)
        return self._channels[key]

    def stuck(self) -> tuple[list[report.Stuck], int]:
        """The threads that wait, and the number of ranks that have ended."""
        return report.stuck(self._scheduler.waiting, self._contexts), len(self._results)

    def end(self, failure: str) -> None:
        """End the run of this process with ``WorldError``."""
        self._failure = failure
        self._ended.set()


_M_ARENA_MAX = -8
"""In glibc's malloc.h."""


def _share_free_memory() -> None:
    """Let all threads reuse memory that any of them has freed.

    glibc has several arenas, whose free memory others cannot use; one is enough, because one thread runs at a time.
    With 8 copies of a model on 64 ranks, activations then took 49 MB instead of 86 MB.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries lack it
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)


def _divide_torch() -> None:
    """Give every rank groups of its own in torch.distributed; the rest of the process keeps those that it has."""
    distributed_c10d._world = cast(Any, Forwarding(_TORCH_WORLD))  # torch's extension point for this purpose
    dist.new_group = lambda *args, **named: _NEW_GROUP()(*args, **named)  # torch's own needs a store and all ranks
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _refuse, devices=["cpu"])


def _refuse(*_: Any) -> Any:
    raise WorldError("the backend simulated is that of cpu_ranks.simulated.world; it cannot be chosen by its name")
