"""Experts stored in MXFP4, as gpt-oss is published: 4-bit floats in blocks of 32 with a common power of two."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from megatron_core.errors import CheckpointError
from megatron_core.hub.hugging_face.files import TensorFiles

BLOCKS, SCALES = "_blocks", "_scales"
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the codes 0 to 7; codes 8 to 15 are their negatives (E2M1)."""
BLOCK = 32
"""Values with a common scale."""
SCALE_BIAS = 127
"""Exponent of two of the scale 0 (E8M0)."""


class Mxfp4Files(TensorFiles):
    """Files in which ``NAME_blocks`` and ``NAME_scales`` stand for the tensor ``NAME``, ``[E, in, out]`` in bfloat16.

    Blocks are ``[E, out, in / 32, 16]``, two values a byte, the first in the lower four bits; scales are
    ``[E, out, in / 32]``. value = code x 2^(scale - 127). Source: OCP Microscaling Formats 1.0; names and shapes:
    transformers' mxfp4.py.
    Errors: ``CheckpointError`` for blocks and scales that do not belong together.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._packed = {name.removesuffix(BLOCKS) for name in self.names if name.endswith(BLOCKS)}
        parts = {name + suffix for name in self._packed for suffix in (BLOCKS, SCALES)}
        if absent := sorted(parts - self.names):
            self.close()
            raise CheckpointError(
                f"{folder} has no {absent[0]}, without which its blocks have no meaning; copy it again"
            )
        self.names = (self.names - parts) | self._packed

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, ``[E, in, out]`` for blocks."""
        if name not in self._packed:
            return super().shape(name)
        blocks, scales = super().shape(name + BLOCKS), super().shape(name + SCALES)
        if len(blocks) != 4 or blocks[3] != BLOCK // 2 or blocks[:3] != scales:
            raise CheckpointError(
                f"{self.folder}: {name}{BLOCKS} has the shape {list(blocks)} and {name}{SCALES} {list(scales)}; "
                f"they must be [experts, rows, blocks, {BLOCK // 2}] and [experts, rows, blocks]"
            )
        return blocks[0], blocks[2] * BLOCK, blocks[1]

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor; blocks are bfloat16, which holds their values exactly."""
        return torch.bfloat16 if name in self._packed else super().dtype(name)

    def read(self, name: str, index: tuple[slice, ...]) -> Tensor:
        """Read a part of a tensor; of blocks, those that contain the part."""
        if name not in self._packed:
            return super().read(name, index)
        experts, features, outputs = (*index, *(slice(None),) * (3 - len(index)))
        start, stop, step = features.indices(self.shape(name)[1])
        first = start // BLOCK
        stored = (experts, outputs, slice(first, -(-stop // BLOCK)))
        values = dequantized(super().read(name + BLOCKS, stored), super().read(name + SCALES, stored))
        return values[..., start - first * BLOCK : stop - first * BLOCK : step].transpose(1, 2)


def dequantized(blocks: Tensor, scales: Tensor) -> Tensor:
    """Blocks ``[..., g, 16]`` and scales ``[..., g]`` of bytes -> the values ``[..., 32 g]`` in bfloat16."""
    table = torch.tensor([sign * value for sign in (1.0, -1.0) for value in VALUES], dtype=torch.bfloat16)
    codes = torch.stack([blocks & 0x0F, blocks >> 4], dim=-1).flatten(-2)
    exponents = scales.to(torch.int32).unsqueeze(-1) - SCALE_BIAS
    return torch.ldexp(table[codes.int()], exponents).flatten(-2)
