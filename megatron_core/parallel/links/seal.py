"""Messages that carry their checksum: the bytes of a tensor, followed by hash + number of the message.

The number detects outdated messages, whose bytes and checksum are consistent.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_core.parallel.links.checksums import bit_hash

_WORD = 8


def sealed(x: Tensor, number: int) -> Tensor:
    """The bytes of a contiguous tensor with its checksum, as uint8."""
    message = empty_message(x.numel() * x.element_size(), x.device)
    data, word = _split(message, x.numel() * x.element_size())
    data.copy_(x.detach().view(-1).view(torch.uint8))
    word.copy_(bit_hash(data) + number)
    return message


def empty_message(size: int, device: torch.device) -> Tensor:
    """A buffer for the message of a tensor of ``size`` bytes."""
    return torch.zeros(-(-size // _WORD) * _WORD + _WORD, dtype=torch.uint8, device=device)


def payload(message: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The tensor within a message, as a view."""
    size = torch.Size(shape).numel() * dtype.itemsize
    return message[:size].view(dtype).view(shape)


def is_intact(message: Tensor, size: int, number: int) -> Tensor:
    """Whether the checksum of a message fits its ``size`` bytes and its ``number``: a bool on the device."""
    data, word = _split(message, size)
    return bit_hash(data) + number == word


def _split(message: Tensor, size: int) -> tuple[Tensor, Tensor]:
    return message[:size], message[-_WORD:].view(torch.int64)[0]
