"""Handles of collectives."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_core.parallel.meter import Waited
from megatron_core.parallel.watched import Watched


class Done:
    """The handle of an operation that is already complete."""

    def wait(self) -> None:
        """Return immediately."""


class All:
    """The handle of several operations; keeps the send buffer ``sent`` alive until they are complete."""

    def __init__(self, works: "Sequence[Handle]", sent: Tensor) -> None:
        self._works = works
        self._sent = sent

    def wait(self) -> None:
        """Wait for all operations."""
        for work in self._works:
            work.wait()


class SummedAfter:
    """The handle of a reduce-scatter in higher precision: the sum is computed after all messages have arrived."""

    def __init__(self, arriving: "Handle", received: Tensor, shard: Tensor) -> None:
        self._arriving = arriving
        self._received = received
        self._shard = shard

    def wait(self) -> None:
        """Wait for the messages and sum them in the wider of both dtypes, at least float32."""
        self._arriving.wait()
        # At least float32, also if message and shard have 16 bits: the purpose of this handle.
        wide = torch.promote_types(torch.promote_types(self._received.dtype, self._shard.dtype), torch.float32)
        terms = self._received.view(-1, self._shard.numel())
        # Without a temporary of the shard's size if the sum can be written in place.
        if self._shard.dtype == wide:
            torch.sum(terms, 0, dtype=wide, out=self._shard)
        else:
            self._shard.copy_(terms.sum(0, dtype=wide))


Handle = dist.Work | Done | All | Waited | Watched | SummedAfter
