"""The process group of a simulated rank, with the operations of ``shared_memory.group`` through memory."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megatron_core.cpu_ranks.filled_work import FilledWork, spread
from megatron_core.cpu_ranks.simulated.meeting import (
    REDUCTIONS,
    Channel,
    Meeting,
    Part,
    RankCall,
    Signature,
    WaitingReceive,
    in_short,
)
from megatron_core.cpu_ranks.simulated.scheduler import Waiting
from megatron_core.errors import LayoutError

# torch's types overload these methods with signatures that torch itself does not call.
_ProcessGroup: Any = dist.ProcessGroup


class _Work(FilledWork):
    """The handle of an operation; ``wait`` completes it and writes its result."""

    def __init__(self, filled: list[Tensor]) -> None:
        super().__init__(filled)
        self._done = False

    def _is_ready(self) -> bool:
        raise NotImplementedError

    def _finish(self) -> None:
        raise NotImplementedError

    def _sleep(self) -> None:
        raise NotImplementedError

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Let other ranks run until the operation is complete."""
        if not self._done:
            if not self._is_ready():
                self._sleep()
            self._finish()
            self._done = True
        return True

    def is_completed(self) -> bool:
        """Whether ``wait`` would return immediately."""
        return self._done or self._is_ready()


class _Sent(_Work):
    """The handle of a send, which is complete."""

    def _is_ready(self) -> bool:
        return True

    def _finish(self) -> None:
        pass


class _Received(_Work):
    """The handle of a receive."""

    def __init__(self, group: "SimulatedGroup", receive: WaitingReceive, sender: int) -> None:
        super().__init__([receive.buffer])
        self._group = group
        self._receive = receive
        self._sender = sender

    def _source_rank(self) -> int:
        """Called by torch."""
        return self._sender

    def _is_ready(self) -> bool:
        return self._receive.message is not None

    def _sleep(self) -> None:
        ranks = self._group.channel.ranks

        def describe() -> str:
            buffer = self._receive.buffer
            return f"for a message of {_form(buffer)} from rank {ranks[self._sender]}"

        receiver = ranks[self._group.rank()]
        sender = ranks[self._sender]
        self._receive.waiting = Waiting(receiver, "message", describe, lambda: [sender])
        self._group.channel.scheduler.wait(self._receive.waiting)
        self._receive.waiting = None  # it refers to this handle, and would keep the buffer until a garbage collection

    def _finish(self) -> None:
        message = self._receive.message
        buffer = self._receive.buffer
        assert message is not None, "the message has arrived"
        if message.numel() != buffer.numel() or message.dtype != buffer.dtype:
            raise LayoutError(
                f"rank {self._group.channel.ranks[self._sender]} sent {_form(message)}, but this rank expects "
                f"{_form(buffer)}; send and receive tensors of equal shape and dtype"
            )
        buffer.copy_(message.view(buffer.shape))
        self._receive.message = message.new_empty(0)


class _Collective(_Work):
    """The handle of a collective; ``target`` is filled with this rank's result."""

    def __init__(self, group: "SimulatedGroup", meeting: Meeting, target: Tensor | None, finish: Any = None) -> None:
        super().__init__([] if target is None else [target])
        self._group = group
        self._meeting = meeting
        self._target = target
        self._last = finish

    def _is_ready(self) -> bool:
        return self._meeting.results is not None

    def _sleep(self) -> None:
        meeting = self._meeting
        ranks = self._group.channel.ranks

        def missing() -> list[int]:
            return [ranks[rank] for rank in meeting.missing()]

        def describe() -> str:
            call = f"{meeting.signature}, call {meeting.number} over ranks {in_short(ranks)}"
            absent = missing()
            return f"in {call}, for rank{'s' * (len(absent) > 1)} {in_short(absent)}"

        waiting = Waiting(ranks[self._group.rank()], meeting.signature.operation, describe, missing)
        meeting.waiting.append(waiting)
        self._group.channel.scheduler.wait(waiting)

    def _finish(self) -> None:
        assert self._meeting.results is not None, "the collective is complete"
        result = self._meeting.results[self._group.rank()]
        if self._target is not None and result is not None:
            if result.numel() != self._target.numel():
                raise LayoutError(
                    f"the result of {self._meeting.signature} has {result.numel()} elements, but the output is "
                    f"{_form(self._target)}"
                )
            self._target.copy_(result.view(self._target.shape))
        if self._last is not None:
            self._last()


class SimulatedGroup(_ProcessGroup):
    """The group of a simulated rank over the ranks of ``channel``."""

    def __init__(self, channel: Channel, index: int) -> None:
        super().__init__(index, len(channel.ranks))
        self.channel = channel
        self._index = index
        self._calls = 0

    def getBackendName(self) -> str:
        """The backend's name in torch.distributed."""
        return "simulated"

    def allreduce(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        """Sum, minimum or maximum, in place."""
        (x,) = tensors
        return self._call("all-reduce", x, x, detail=_reduction(opts))

    def broadcast(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        """Broadcast from the group's rank ``opts.rootRank``."""
        (x,) = tensors
        return self._call("broadcast", x, x, detail=f"from {opts.rootRank}", root=opts.rootRank)

    def all_gather_single(self, output: Tensor, x: Tensor, opts: Any = None) -> dist.Work:
        """Concatenate every rank's ``x``."""
        return self._call("all-gather", x, output)

    def reduce_scatter_single(self, output: Tensor, x: Tensor, opts: Any) -> dist.Work:
        """Reduce ``x`` and keep this rank's part."""
        return self._call("reduce-scatter", x, output, detail=_reduction(opts))

    def all_to_all_single(
        self, output: Tensor, x: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> dist.Work:
        """Send part j of ``x`` to rank j; splits count rows of dim 0 and default to equal parts."""
        send = self._splits(x, input_splits)
        receive = self._splits(output, output_splits)
        signature = Signature("all-to-all", x.dtype, x[:1].numel() if len(x) else output[:1].numel())
        if not len(x) and not len(output):
            signature = Signature("all-to-all", x.dtype, x.shape[1:].numel())
        return self._meet(signature, Part(_flat(x), send, receive), output)

    def barrier(self, opts: Any = None) -> dist.Work:
        """Complete once all ranks have called it."""
        return self._meet(Signature("barrier"), Part(), None)

    def send(self, tensors: list[Tensor], receiver: int, tag: int) -> dist.Work:
        """Send a copy; complete immediately."""
        (x,) = tensors
        self.channel.send((self._index, receiver, tag), x.detach().clone())
        return _Sent([x])

    def recv(self, tensors: list[Tensor], sender: int, tag: int) -> dist.Work:
        """Receive the next message of ``sender`` with this tag, in the order of sending."""
        (x,) = tensors
        return _Received(self, self.channel.receive((sender, self._index, tag), x), sender)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        """Gather every rank's tensor into a list; shapes may differ, numbers of elements may not."""
        (x,) = inputs
        (outputs_of_ranks,) = outputs
        flat = x.new_empty(self.size() * x.numel())
        return self._call("all-gather", x, flat, finish=partial(spread, flat, outputs_of_ranks))

    # torch 2.13 renamed these.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single

    def _call(
        self,
        name: str,
        x: Tensor,
        target: Tensor,
        *,
        detail: str = "",
        root: int = 0,
        finish: Callable[[], None] | None = None,
    ) -> dist.Work:
        return self._meet(Signature(name, x.dtype, x.numel(), detail), Part(_flat(x)), target, root=root, finish=finish)

    def _meet(
        self,
        signature: Signature,
        contribution: Part,
        target: Tensor | None,
        *,
        root: int = 0,
        finish: Callable[[], None] | None = None,
    ) -> dist.Work:
        self._calls += 1
        meeting = self.channel.call(RankCall(self.channel.key, self._index, self._calls, signature, contribution, root))
        return _Collective(self, meeting, target, finish)

    def _splits(self, x: Tensor, rows: Sequence[int]) -> Sequence[int]:
        """Rows of ``x`` for each rank."""
        size = self.size()
        if not rows and x.shape[0] % size == 0:
            return [x.shape[0] // size] * size
        if len(rows) != size or sum(rows) != x.shape[0]:
            raise LayoutError(
                f"all-to-all of {_form(x)} over {size} ranks: {list(rows)} must be {size} row counts that sum to "
                f"{x.shape[0]}"
            )
        return rows


def _reduction(opts: Any) -> str:
    try:
        return REDUCTIONS[opts.reduceOp.op]
    except KeyError:
        legal = ", ".join(REDUCTIONS.values())
        raise LayoutError(f"a simulated world cannot reduce by {opts.reduceOp}; legal: {legal}") from None


def _flat(x: Tensor) -> Tensor:
    if not x.is_contiguous():
        raise LayoutError(f"collectives need contiguous tensors, not {_form(x)} with strides {x.stride()}")
    return x.detach()


def _form(x: Tensor) -> str:
    return f"{list(x.shape)} {str(x.dtype).removeprefix('torch.')}"
