"""Messages of groups of replicas: their outer gradients, exact or rounded, and the mean over the groups.

Rounded numbers have one scale for each tensor, its largest absolute value in this group, so that they do not depend on
how the tensor is split over the ranks of a group.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_core.parallel.collectives import all_gather_flat_, all_reduce_
from megatron_core.parallel.groups import Group
from megatron_core.parallel.handles import Handle
from megatron_core.parallel.meter import COMPRESSED, METER

LARGEST_E4M3 = 448.0


class GroupMessage:
    """The mean over the ranks of ``group`` of their flat tensors ``values``, which it may overwrite.

    ``exchange``: a value of ``outer_exchange``; ``lengths`` and ``largest`` (same dtype as ``values``) are the lengths
    of the parts of tensors in ``values`` and the largest absolute value of each of the whole tensors.
    """

    def __init__(self, values: Tensor, exchange: str, lengths: Sequence[int], largest: Tensor, group: Group) -> None:
        self._values = values
        self._kind = exchange
        self._lengths = list(lengths)
        self._group = group
        self._received: Tensor | None = None
        if exchange == "full":
            self._handle: Handle = all_reduce_(values, group, async_op=True)
            return
        encoded = values.bfloat16() if exchange == "bf16" else self._encoded(largest)
        self._received = encoded.new_empty(group.size() * encoded.numel())
        if group.size() == 1:
            self._received.copy_(encoded)
        with METER.labelled(COMPRESSED):
            self._handle = all_gather_flat_(self._received, encoded, group, async_op=True)

    def wait(self) -> Tensor:
        """Return the mean, when the messages of all ranks have arrived."""
        self._handle.wait()
        total = self._values
        if self._received is not None:
            rows = self._received.view(self._group.size(), -1)
            total = torch.zeros_like(self._values)
            for row in rows:
                total += row if self._kind == "bf16" else self._decoded(row)
        return total.div_(self._group.size())

    def _encoded(self, largest: Tensor) -> Tensor:
        """The scales as bytes, followed by the numbers relative to them."""
        relative = self._values / self._spread(largest).clamp_min(torch.finfo(largest.dtype).tiny)
        if self._kind == "fp8":
            codes = (relative * LARGEST_E4M3).to(torch.float8_e4m3fn).view(torch.uint8)
        else:
            codes = packed_codes(to_e3m0(relative))
        return torch.cat([largest.view(torch.uint8), codes])

    def _decoded(self, row: Tensor) -> Tensor:
        size = len(self._lengths) * self._values.element_size()
        largest = row[:size].clone().view(self._values.dtype)
        codes = row[size:]
        if self._kind == "fp8":
            relative = codes.view(torch.float8_e4m3fn).to(largest.dtype) / LARGEST_E4M3
        else:
            relative = from_e3m0(unpacked(codes, self._values.numel()), largest.dtype)
        return relative * self._spread(largest)

    def _spread(self, largest: Tensor) -> Tensor:
        """The value of each tensor for each of its elements."""
        lengths = torch.tensor(self._lengths, dtype=torch.int64, device=largest.device)
        return largest.repeat_interleave(lengths, output_size=self._values.numel())


def to_e3m0(x: Tensor) -> Tensor:
    """Codes of the nearest of 0 and +-2^-6, ..., +-2^0 to each number of ``x``, uint8: 0 to 7, plus 8 if negative."""
    size = x.abs()
    exponent = torch.floor(torch.log2(size / 0.75)).clamp(-6, 0)  # 0.75 is half-way between 1/2 and 1
    code = torch.where(size < 2.0**-7, torch.zeros_like(size), exponent + 7).to(torch.uint8)
    return code + 8 * (x < 0).to(torch.uint8)


def from_e3m0(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of ``to_e3m0``."""
    powers = [0.0, *(2.0**exponent for exponent in range(-6, 1))]
    table = torch.tensor(powers + [-power for power in powers], dtype=dtype, device=codes.device)
    return table[codes.long()]


def packed_codes(codes: Tensor) -> Tensor:
    """Two codes of 4 bits in each byte; an odd last one is followed by 0."""
    codes = torch.cat([codes, codes.new_zeros(len(codes) % 2)])
    return codes[::2] + 16 * codes[1::2]


def unpacked(data: Tensor, length: int) -> Tensor:
    """The inverse of ``packed_codes``, for ``length`` codes."""
    return torch.stack([data % 16, data // 16], 1).view(-1)[:length]
