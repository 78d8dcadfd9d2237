"""Formats of the messages between stages: their interface, and messages of one tensor of a known shape."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from megatron_core.errors import LayoutError
from megatron_core.pipeline_parallel.p2p import MessageHandle, PipelineP2P
from megatron_core.schedules.actions import Action

Message = Tensor | tuple[Tensor, ...]
Received = tuple[Message, list[MessageHandle]]
"""A message, which is valid when all handles are complete."""
Sent = list[tuple[Tensor, MessageHandle]]
"""Tensors that must not change until their handles are complete."""


def tensors_of(message: Message) -> tuple[Tensor, ...]:
    """Return the tensors of a message."""
    return (message,) if isinstance(message, Tensor) else message


class Messages(Protocol):
    """Format of the messages of one step; see ``MessageFormat``, and ``any_model.messages`` for others."""

    @property
    def device(self) -> torch.device:
        """Device of the messages."""

    @property
    def posts_late(self) -> bool:
        """Whether receives cannot be posted before their action, because shapes are not known yet."""

    def with_lengths(self, lengths: Mapping[int, int]) -> "Messages":
        """Return the format with these lengths by micro-batch."""

    def check(self, action: Action, output: Message) -> None:
        """Check the output of a forward that another stage consumes: a shorter one would fill only part of a buffer."""

    def trained(self, action: Action, message: Message) -> list[Tensor]:
        """Return the tensors of a forward's output whose gradients are sent back."""

    def packed(self, gradients: tuple[Tensor, ...]) -> Message:
        """Return the message with ``gradients``."""

    def send(self, p2p: PipelineP2P, action: Action, message: Message, receiver: int) -> Sent:
        """Start to send the output of ``action``."""

    def receive(self, p2p: PipelineP2P, source: Action, sender: int) -> Received:
        """Start to receive the output of ``source``."""

    def send_failure(self, p2p: PipelineP2P, error: Exception, receiver: int) -> Sent:
        """Start to send, instead of the next message to ``receiver``, the reason why there is none."""


@dataclass(frozen=True)
class MessageFormat:
    """Shape, dtype and device of messages that consist of one tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    lengths: Mapping[int, int] = field(default_factory=dict)
    """First dimension by micro-batch, where it differs from that of ``shape``."""
    variable: bool = False
    """Whether the receiver does not know shapes: each is sent before its message, and receives are not posted early."""

    @property
    def posts_late(self) -> bool:
        """Whether shapes are ``variable``."""
        return self.variable

    def with_lengths(self, lengths: Mapping[int, int]) -> "MessageFormat":
        """Return the format with these lengths by micro-batch."""
        return replace(self, lengths=lengths)

    def shape_of(self, micro: int) -> tuple[int, ...]:
        """Shape of a micro-batch's messages."""
        return (self.lengths.get(micro, self.shape[0]), *self.shape[1:]) if self.shape else ()

    def check(self, action: Action, output: Message) -> None:
        """Check shape and dtype of an output; ``send`` checks those of gradients, too."""
        (tensor,) = tensors_of(output)
        shape = tuple(tensor.shape) if self.variable else self.shape_of(action.micro)
        if tuple(tensor.shape) != shape or tensor.dtype != self.dtype:
            raise LayoutError(
                f"{action} gives {list(tensor.shape)} in {tensor.dtype}, but its message to the next pipeline stage is "
                f"{list(shape)} in {self.dtype}; give every micro-batch the same seq_length and "
                "micro_batch_size, or give the lengths of those that differ"
            )

    def trained(self, action: Action, message: Message) -> list[Tensor]:
        """Return the message: gradients of all outputs are sent back."""
        return list(tensors_of(message))

    def packed(self, gradients: tuple[Tensor, ...]) -> Message:
        """Return the gradient of the only tensor."""
        return gradients[0]

    def send(self, p2p: PipelineP2P, action: Action, message: Message, receiver: int) -> Sent:
        """Start to send the output of ``action``."""
        self.check(action, message)
        # Outputs may be views, such as a transposed tensor; a message is contiguous memory.
        tensor = tensors_of(message)[0].contiguous()
        if self.variable:
            return [(tensor, handle) for handle in p2p.send_with_shape(tensor, receiver)]
        return [(tensor, p2p.send(tensor, receiver))]

    def receive(self, p2p: PipelineP2P, source: Action, sender: int) -> Received:
        """Start to receive the output of ``source``."""
        if self.variable:
            tensor, handle = p2p.receive_with_shape(len(self.shape), self.dtype, self.device, sender)
        else:
            tensor, handle = p2p.receive(self.shape_of(source.micro), self.dtype, self.device, sender)
        return tensor, [handle]

    def send_failure(self, p2p: PipelineP2P, error: Exception, receiver: int) -> Sent:
        """Send nothing: these messages have no place for it."""
        return []
