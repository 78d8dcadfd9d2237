"""Messages between pipeline ranks."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_core.ops.rows import copied_to
from megatron_core.parallel.flight_recorder import RECORDER
from megatron_core.parallel.groups import ParallelGroups, process_group
from megatron_core.parallel.meter import METER
from megatron_core.parallel.watched import OBSERVATION


class MessageHandle(Protocol):
    """The handle of a send or a receive."""

    def wait(self) -> object:
        """Wait until it is complete."""

    def is_completed(self) -> bool:
        """Whether it is complete."""


class Sending:
    """The handle of a send that keeps the message until it is complete."""

    def __init__(self, work: Any, message: Tensor) -> None:
        self._work = work
        self._message = message

    def wait(self) -> None:
        """Wait for the send."""
        self._work.wait()

    def is_completed(self) -> bool:
        """Whether the send is complete."""
        return bool(self._work.is_completed())


class PipelineP2P:
    """Sends and receives between this pipeline rank and the others.

    Messages to higher ranks and messages to lower ranks use two groups, so that each communicator carries only one
    direction. Sends and receives are then matched in the order of sending and never across directions, also with two
    ranks, where all chunks and both directions use the same pair of ranks.
    """

    # If all messages of a group share a stream, each link has its own group (``ParallelGroups.create_link_groups``): a
    # receive posted ahead would block later sends.

    def __init__(self, groups: ParallelGroups) -> None:
        self._groups = groups
        self.index = groups.index("pp")
        self._ranks = groups.ranks("pp")
        self._up = groups.group("pp")
        self._down = groups.reverse_pp
        self.has_run = False
        """Whether a plan with backward has run."""

    def _group(self, sender: int, receiver: int) -> dist.ProcessGroup:
        link = self._groups.links.get((sender, receiver))
        return process_group(link or (self._up if receiver > sender else self._down))

    def send(self, tensor: Tensor, receiver: int) -> MessageHandle:
        """Start a send to pipeline rank ``receiver``; ``tensor`` must not change until the handle is complete."""
        group = self._group(self.index, receiver)
        METER.sent("pp send", tensor.nbytes)
        RECORDER.note_message(self._ranks[self.index], self._ranks[receiver], tensor)
        sender = self._ranks[self.index]
        to = self._ranks[receiver]
        observer = OBSERVATION.observer
        message = tensor
        if observer is not None and observer.sealing:
            message = observer.message(tensor, sender, to)
        handle = dist.isend(message, dst=to, group=group)
        assert handle is not None, "None is for ranks outside the group"
        return handle if message is tensor else Sending(handle, message)

    def receive(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, sender: int
    ) -> tuple[Tensor, MessageHandle]:
        """Start a receive from pipeline rank ``sender``; the tensor is valid when the handle is complete."""
        return self.receive_into(torch.empty(shape, dtype=dtype, device=device), sender)

    def receive_into(self, buffer: Tensor, sender: int) -> tuple[Tensor, MessageHandle]:
        """As ``receive``, into ``buffer``."""
        group = self._group(sender, self.index)
        RECORDER.note_message(self._ranks[sender], self._ranks[self.index], buffer)
        observer = OBSERVATION.observer
        source = self._ranks[sender]

        def start(message: Tensor) -> dist.Work:
            handle = dist.irecv(message, src=source, group=group)
            assert handle is not None, "None is for ranks outside the group"
            return handle

        if observer is None or not observer.watches_messages:
            return buffer, start(buffer)
        return buffer, observer.receive(buffer, source, self._ranks[self.index], start)

    def send_with_shape(self, tensor: Tensor, receiver: int) -> list[MessageHandle]:
        """As ``send``, with the shape sent before the values; return both handles."""
        # On the device of the message, because NCCL sends no CPU tensors.
        shape = copied_to(tensor.shape, torch.int64, tensor.device)
        return [self.send(shape, receiver), self.send(tensor, receiver)]

    def receive_with_shape(
        self, dims: int, dtype: torch.dtype, device: torch.device, sender: int
    ) -> tuple[Tensor, MessageHandle]:
        """As ``receive`` for a message of ``send_with_shape`` with ``dims`` dimensions; waits for its shape."""
        shape, handle = self.receive((dims,), torch.int64, device, sender)
        handle.wait()
        return self.receive(tuple(shape.tolist()), dtype, device, sender)

    def warm_up(self, device: torch.device, stage_to_rank: Sequence[int]) -> None:
        """Send one number over every link between stages, in the same order on all ranks; once for each layout.

        ``stage_to_rank[stage]`` is the pipeline rank of a stage.

        NCCL creates a communicator at the first use of a link, and each end blocks until the other end joins. A receive
        posted early would block this rank while the sender waits for a message of this rank: a deadlock.
        """
        if self._groups.pipeline_connected:
            return
        self._groups.pipeline_connected = True
        neighbours = {(a, b) for a, b in pairwise(stage_to_rank) if a != b}
        links = sorted(neighbours | {(b, a) for a, b in neighbours})
        self._groups.create_link_groups(links)
        for sender, receiver in links:
            if self.index == sender:
                self.send(torch.zeros(1, device=device), receiver).wait()
            elif self.index == receiver:
                self.receive((1,), torch.float32, device, sender)[1].wait()
