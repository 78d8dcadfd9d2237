"""Exchange of the numbers of rows that ranks send to each other's experts, and their copy to the host.

The host needs them for the sizes of messages and products. The exchange between the ranks and the copy to the host
start as soon as the experts are chosen, and ``wait`` returns when they have arrived; between both the rank gathers the
rows to send. On a GPU they use a stream of their own, so that neither the host nor the computation waits for work that
was queued later.
"""

from functools import cache

import torch
from torch import Tensor

from megatron_core.parallel.collectives import start_all_to_all_rows
from megatron_core.parallel.groups import Group
from megatron_core.parallel.meter import Waited


class ArrivingCounts:
    """The exchange of ``counts`` ``[ranks, experts of a rank]``: the rows that this rank sends for each expert."""

    def __init__(self, counts: Tensor, group: Group) -> None:
        """Start the exchange."""
        self._own = counts
        ones = [1] * group.size()
        self.theirs, self._handle = start_all_to_all_rows(counts, ones, ones, group)
        """``[ranks, experts of a rank]``: the rows that each rank sends to this one; valid after ``wait``."""
        self._copied: tuple[Tensor, torch.cuda.Event] | None = None
        if counts.device.type == "cuda":
            self._copied = self._copy()

    def wait(self) -> tuple[list[list[int]], list[list[int]]]:
        """Return the rows that this rank sends to each rank for each expert, and those that it receives."""
        if self._copied is None:
            self._handle.wait()
            return self._own.tolist(), self.theirs.tolist()
        numbers, copied = self._copied
        # The meter charges the wait to the collective.
        if isinstance(self._handle, Waited):
            self._handle.wait(instead=copied.synchronize)
        else:
            copied.synchronize()
        to_send, to_receive = numbers.tolist()
        return to_send, to_receive

    def _copy(self) -> tuple[Tensor, torch.cuda.Event]:
        """Start the copy to pinned memory."""
        device = self._own.device
        stream = _stream(device)
        copied = torch.cuda.Event()
        # The counts are computed in the current stream.
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            work = self._handle.work if isinstance(self._handle, Waited) else self._handle
            work.wait()  # only the stream waits
            numbers = torch.empty((2, *self._own.shape), dtype=self._own.dtype, pin_memory=True)
            for row, counts in zip(numbers, (self._own, self.theirs), strict=True):
                row.copy_(counts, non_blocking=True)
            copied.record(stream)
        return numbers, copied


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """The stream for copies of counts from ``device``."""
    return torch.cuda.Stream(device)
