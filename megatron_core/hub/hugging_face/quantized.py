"""Weights stored in fewer bits: in FP8 with a scale for each block, as DeepSeek-V3, MiniMax-M2 and the FP8 editions of
Qwen3 are; experts in MXFP4, as gpt-oss is: 4-bit floats in blocks of 32 with a common power of two."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_core.errors import CheckpointError, quoted
from megatron_core.hub.hugging_face.files import TensorFiles

SCALE = "_scale_inv"
FORMAT = "F8_E4M3"
"""The dtype of the weights in safetensors."""


class Fp8BlockFiles(TensorFiles):
    """Files in which ``NAME`` in float8_e4m3 and ``NAME_scale_inv`` stand for the tensor ``NAME`` in float32.

    ``NAME`` is ``[out, in]`` and its scales ``[ceil(out / b0), ceil(in / b1)]``, with the block ``b0 x b1`` of
    ``weight_block_size``. value[i, j] = code[i, j] x scale[i // b0, j // b1]. Source: DeepSeek-V3 Technical Report,
    section 3.3.2; names: transformers' integration of finegrained FP8.
    Errors: ``CheckpointError`` for weights and scales that do not belong together.
    """

    def __init__(self, folder: Path, quantization: Mapping[str, Any], *, text_only: bool = False) -> None:
        """``quantization``: ``quantization_config`` of config.json; ``text_only``: of a multimodal folder."""
        self._block = block_of(quantization)
        super().__init__(folder, text_only=text_only)
        self._packed = {name.removesuffix(SCALE) for name in self.names if name.endswith(SCALE)}
        if absent := sorted(self._packed - self.names):
            self.close()
            raise CheckpointError(f"{folder} has {absent[0]}{SCALE} without {absent[0]}; copy the files again")
        self.names -= {name + SCALE for name in self._packed}

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, which its scales must fit."""
        shape = super().shape(name)
        if name in self._packed:
            scales = super().shape(name + SCALE)
            rows, columns = self._block
            if len(shape) != 2 or scales != (-(-shape[0] // rows), -(-shape[1] // columns)):
                raise CheckpointError(
                    f"{self.folder}: {name} has the shape {list(shape)} and {name}{SCALE} {list(scales)}, which is not "
                    f"one scale for each block of weight_block_size={list(self._block)}; copy the files again"
                )
        return shape

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor; weights with scales are read as float32."""
        if name not in self._packed:
            return super().dtype(name)
        stored_dtype = self._slice(name).get_dtype()
        if stored_dtype != FORMAT:
            raise CheckpointError(f"{self.folder}: {name} has scales and the dtype {stored_dtype}; it must be {FORMAT}")
        return torch.float32

    def read(self, name: str, index: tuple[slice, ...]) -> Tensor:
        """Read a part of a tensor, with the scales of its blocks."""
        if name not in self._packed:
            return super().read(name, index)
        self.dtype(name)
        shape = self.shape(name)
        dim_indices = (*index, *(slice(None),) * (2 - len(index)))
        codes = super().read(name, dim_indices)
        everything = (slice(None), slice(None))
        scales = super().read(name + SCALE, everything).float()
        for dim, (dim_index, size, block) in enumerate(zip(dim_indices, shape, self._block, strict=True)):
            positions = torch.arange(*dim_index.indices(size)) // block
            scales = scales.index_select(dim, positions)
        return codes.float() * scales


def block_of(quantization: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and columns of the blocks of ``quantization_config``. Errors: ``CheckpointError`` for other formats."""
    block: Any = quantization.get("weight_block_size")
    is_pair = isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)
    if not is_pair or quantization.get("fmt", "e4m3") != "e4m3":
        raise CheckpointError(
            f"config.json: quantization_config={quoted(quantization)} is not supported; fp8 needs fmt='e4m3' and "
            "weight_block_size=[rows, columns]"
        )
    return block[0], block[1]


BLOCKS = "_blocks"
SCALES = "_scales"
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
        stored_names = {name + suffix for name in self._packed for suffix in (BLOCKS, SCALES)}
        if absent := sorted(stored_names - self.names):
            self.close()
            raise CheckpointError(
                f"{folder} has no {absent[0]}, without which its blocks have no meaning; copy it again"
            )
        self.names = (self.names - stored_names) | self._packed

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, ``[E, in, out]`` for blocks."""
        if name not in self._packed:
            return super().shape(name)
        blocks = super().shape(name + BLOCKS)
        scales = super().shape(name + SCALES)
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
