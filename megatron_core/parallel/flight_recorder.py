"""Records this rank's latest collectives and messages, to explain a hang."""

import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import typing_extensions  # its wrappers are on the stack of many functions of torch
from torch import Tensor

from megatron_core.parallel.rank_local import Forwarding, RankLocal

Note = tuple[str, str, tuple[int, ...], Any]
"""Channel, kind, shape and dtype of a call."""
KEPT = 64
"""Number of calls that are kept; if ranks differ by more, only their counts are compared."""
LIBRARIES = (str(Path(torch.__file__).parent), typing_extensions.__file__, str(Path(__file__).parent))
"""Code that makes calls for a program; reports name the line of the program."""


class FlightRecorder:
    """Counts the calls of each channel and keeps the latest ones."""

    def __init__(self) -> None:
        # Bounded and of plain tuples, because each collective of every run adds one, and only the report of a hang
        # reads them.
        self.calls: deque[tuple[str, int, str, tuple[int, ...], Any, float]] = deque(maxlen=KEPT)
        """Channel, number in the channel, kind, shape, dtype and time of each call."""
        self._captured: list[Note] | None = None
        self.counts: dict[str, int] = defaultdict(int)
        """Number of calls of each channel."""
        self._channels: dict[dist.ProcessGroup, str] = {}
        self.ranks: dict[str, tuple[int, ...]] = {}
        """The ranks of each channel."""

    @property
    def last(self) -> float:
        """Time of the latest call; 0 if there was none."""
        return self.calls[-1][-1] if self.calls else 0.0

    def note(self, what: str, group: dist.ProcessGroup, x: Tensor) -> None:
        """Record a collective over ``group``."""
        # Ranks of one group list the same members, so the list is a name that all of them agree on; groups' own names
        # differ.
        if group not in self._channels:
            ranks = tuple(dist.get_process_group_ranks(group))
            self._channels[group] = str(list(ranks))
            self.ranks[self._channels[group]] = ranks
        self._add(self._channels[group], what, x)

    def note_message(self, sender: int, receiver: int, x: Tensor) -> None:
        """Record a message that this rank sends or receives; ranks are global."""
        channel = f"{sender}>{receiver}"
        self.ranks[channel] = (sender, receiver)
        self._add(channel, f"message from rank {sender} to {receiver}", x)

    @contextmanager
    def capturing(self) -> Iterator[list[Note]]:
        """Collect the calls of a CUDA graph instead of recording them, for ``repeat`` at each replay."""
        self._captured = []
        try:
            yield self._captured
        finally:
            self._captured = None

    def repeat(self, notes: Iterable[Note]) -> None:
        """Record the calls of a replay."""
        for note in notes:
            self._count(*note)

    def _add(self, channel: str, what: str, x: Tensor) -> None:
        note = channel, what, tuple(x.shape), x.dtype
        if self._captured is None:
            self._count(*note)
        else:
            self._captured.append(note)

    def _count(self, channel: str, what: str, shape: tuple[int, ...], dtype: Any) -> None:
        self.counts[channel] += 1
        # A monotonic clock: it is only compared with times of this host, and changes of the system's clock would break
        # the order.
        self.calls.append((channel, self.counts[channel], what, shape, dtype, time.monotonic()))


RECORDER: FlightRecorder = cast(FlightRecorder, Forwarding(RankLocal(FlightRecorder)))
"""The recorder of this rank."""
