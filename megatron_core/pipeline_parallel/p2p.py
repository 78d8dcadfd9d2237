"""Messages between pipeline ranks."""

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_core.parallel.flight_recorder import RECORDER
from megatron_core.parallel.groups import ParallelGroups, process_group
from megatron_core.parallel.meter import METER


class Links:
    """Sends and receives between this pipeline rank and the others.

    Messages to higher ranks and messages to lower ranks go through two groups: each communicator then carries one
    direction only, so that with two ranks, too, where every chunk and both directions join the same pair, messages
    pair up in the order in which they were sent and never across directions.
    """

    def __init__(self, groups: ParallelGroups) -> None:
        self._groups = groups
        self.index = groups.index("pp")
        self._ranks = groups.ranks("pp")
        self._up, self._down = groups.group("pp"), groups.reverse_pp

    def send(self, tensor: Tensor, receiver: int) -> dist.Work:
        """Begin to send to pipeline rank ``receiver``; ``tensor`` must not change until the handle is done."""
        group = process_group(self._up if receiver > self.index else self._down)
        METER.sent("pp send", tensor.nbytes)
        RECORDER.note_message(self._ranks[self.index], self._ranks[receiver], tensor)
        handle = dist.isend(tensor, dst=self._ranks[receiver], group=group)
        assert handle is not None, "None is for ranks outside the group"
        return handle

    def receive(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, sender: int
    ) -> tuple[Tensor, dist.Work]:
        """Begin to receive from pipeline rank ``sender``; the tensor is filled once the handle is done."""
        buffer = torch.empty(shape, dtype=dtype, device=device)
        group = process_group(self._up if sender < self.index else self._down)
        RECORDER.note_message(self._ranks[sender], self._ranks[self.index], buffer)
        handle = dist.irecv(buffer, src=self._ranks[sender], group=group)
        assert handle is not None, "None is for ranks outside the group"
        return buffer, handle

    def send_with_shape(self, tensor: Tensor, receiver: int) -> list[dist.Work]:
        """As ``send``, the shape before the values; both handles."""
        shape = torch.tensor(tensor.shape, dtype=torch.int64, device=tensor.device)
        return [self.send(shape, receiver), self.send(tensor, receiver)]

    def receive_with_shape(
        self, dims: int, dtype: torch.dtype, device: torch.device, sender: int
    ) -> tuple[Tensor, dist.Work]:
        """As ``receive`` for a message of ``send_with_shape`` with ``dims`` dimensions; waits for its shape."""
        shape, handle = self.receive((dims,), torch.int64, device, sender)
        handle.wait()
        return self.receive(tuple(shape.tolist()), dtype, device, sender)

    def warm_up(self, device: torch.device, stage_to_rank: Sequence[int]) -> None:
        """Send one number over every link between stages, in the same order on all ranks; once for each layout.

        ``stage_to_rank[stage]`` is the pipeline rank of a stage.

        NCCL makes a communicator when a link is first used, and both ends block until the other one is there too. A
        receive that is posted early would then wait for a sender who waits for this rank's own message.
        """
        if self._groups.pipeline_connected:
            return
        self._groups.pipeline_connected = True
        neighbours = {(a, b) for a, b in pairwise(stage_to_rank) if a != b}
        for sender, receiver in sorted(neighbours | {(b, a) for a, b in neighbours}):
            if self.index == sender:
                self.send(torch.zeros(1, device=device), receiver).wait()
            elif self.index == receiver:
                self.receive((1,), torch.float32, device, sender)[1].wait()
