"""Matrices in 8-bit floating point: amax, scale and cast in blocks.

A matrix x is stored as ``data = cast(clamp(s x))`` with a scale s per block, so that x is approximately data / s.
Formats: e4m3 (largest number 448, 3 bits of mantissa) and e5m2 (57,344, 2 bits), Micikevicius et al. 2022. All
functions work in plain torch and also support float64, so that an FP8 model can be compared with itself in another
layout. The casts also have native kernels, which read a matrix once or twice and write the memory orders for products.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from megatron_core.ops import native
from megatron_core.ops.backend import Backend, select_backend

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
Order = Literal["rows", "columns", "both"]
"""Memory order of a matrix: row-major, column-major, or one copy of each."""
SMALLEST_AMAX = 1e-12
"""Lower bound of amax in the computation of a scale, for example for a block of zeros; torchao's constant."""
TILE = 128
TILE_BLOCKS = 512
"""Rows and columns of a kernel's tile, and maximal number of blocks in a tile (csrc/common/fp8.h)."""


class Blocks(NamedTuple):
    """Shape of the blocks with one scale each; None: the whole extent."""

    rows: int | None = None
    columns: int | None = None

    def t(self) -> Blocks:
        """The blocks of the transposed matrix."""
        return Blocks(self.columns, self.rows)


WHOLE = Blocks()
ROWS = Blocks(1, None)
COLUMNS = Blocks(None, 1)


@dataclass(frozen=True)
class Quantised:
    """``data`` ``[..., R, C]`` in FP8 with ``scale`` ``[..., R / rows, C / columns]`` (1 for a whole extent)."""

    data: Tensor
    scale: Tensor
    blocks: Blocks
    other: Tensor | None = None
    """``data`` in the other memory order, if both exist."""

    def t(self) -> Quantised:
        """The transposed matrix, a view."""
        return Quantised(self.data.mT, self.scale.mT, self.blocks.t(), None if self.other is None else self.other.mT)

    def by_rows(self) -> Tensor:
        """``data`` in row-major order; copied if necessary."""
        if self.other is not None and not self.data.is_contiguous():
            return self.other.contiguous()
        return self.data.contiguous()

    def __getitem__(self, index: int | slice) -> Quantised:
        """One of several matrices, or some rows of a matrix whose blocks are single rows."""
        scale = self.scale if isinstance(index, slice) and self.scale.shape[0] == 1 else self.scale[index]
        return Quantised(self.data[index], scale, self.blocks)

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """data / s in ``dtype``, with one rounding to float32 or wider and one to ``dtype``."""
        wide = torch.promote_types(dtype, torch.float32)
        inverse = spread_scale(self.scale, self.data.shape, self.blocks).to(wide).reciprocal()
        return (self.data.to(wide) * inverse).to(dtype)


def block_amax(x: Tensor, blocks: Blocks, *, backend: Backend = "auto") -> Tensor:
    """Largest absolute value of each block of ``x`` ``[..., R, C]``: ``[..., R / rows, C / columns]``; NaN for a block
    with a NaN, 0 for an empty block. The last blocks may be smaller than the others. The native kernel returns float32
    or wider."""
    rows, columns = x.shape[-2:]
    height, width = blocks.rows or max(rows, 1), blocks.columns or max(columns, 1)
    if not x.numel():
        shape = [1 if height >= rows else -(-rows // height), 1 if width >= columns else -(-columns // width)]
        return x.new_zeros(*x.shape[:-2], *shape)
    tile = Blocks(blocks.rows or TILE, blocks.columns or TILE)
    if _is_native(x, tile, backend):
        amaxes = torch.empty(_grid(x, tile), dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
        x = x.contiguous()
        native.call("fp8_amax", x, *_sizes(x, tile), x, amaxes)
        undivided = [dim for dim, size in ((-2, blocks.rows), (-1, blocks.columns)) if size is None]
        return amaxes.amax(undivided, keepdim=True) if undivided else amaxes
    if rows % height or columns % width:
        x = torch.nn.functional.pad(x, (0, -columns % width, 0, -rows % height))
    return x.abs().unflatten(-1, (-1, width)).unflatten(-3, (-1, height)).amax(dim=(-3, -1))


def scale_of(amax: Tensor, dtype: torch.dtype, *, margin: int = 0, power_of_two: bool = False) -> Tensor:
    """s = largest(dtype) / amax / 2^margin in float32; ``power_of_two`` rounds it down to a power of two.

    NaN if amax is not finite, so that clamping does not hide an overflow. Source: Micikevicius et al. 2022, section 4;
    torchao ``float8_utils.amax_to_scale``.
    """
    scale = torch.finfo(dtype).max / amax.double().clamp_min(SMALLEST_AMAX) / 2.0**margin
    if power_of_two:
        scale = torch.ldexp(torch.full_like(scale, 0.5), torch.frexp(scale).exponent)
    return (scale + amax.double() * 0.0).float()


def spread_scale(scale: Tensor, shape: torch.Size, blocks: Blocks) -> Tensor:
    """``scale`` expanded to the elements of a matrix of ``shape``; a dim with a single scale keeps size 1."""
    for dim, size in ((-2, blocks.rows), (-1, blocks.columns)):
        if size is not None and size > 1:
            scale = scale.repeat_interleave(size, dim=dim).narrow(dim, 0, shape[dim])
    return scale


def cast_to_fp8(
    x: Tensor, scale: Tensor, dtype: torch.dtype, blocks: Blocks, *, order: Order = "rows", backend: Backend = "auto"
) -> Quantised:
    """Cast ``x`` with the given scales to ``dtype``. Values are clamped: e5m2 would round 61,440 and more to infinity.

    Only native kernels apply ``order``; otherwise the memory order is that of ``x``.
    """
    if _is_native(x, blocks, backend):
        return _cast(x, scale.expand(_grid(x, blocks)).contiguous(), dtype, blocks, order)
    most = torch.finfo(dtype).max
    wide = torch.promote_types(x.dtype, torch.float32)
    scaled = x.to(wide) * spread_scale(scale, x.shape, blocks).to(wide)
    return Quantised(scaled.clamp(-most, most).to(dtype), scale, blocks)


def quantise(
    x: Tensor,
    dtype: torch.dtype,
    blocks: Blocks = WHOLE,
    *,
    power_of_two: bool = False,
    order: Order = "rows",
    backend: Backend = "auto",
) -> Quantised:
    """Cast ``x`` to ``dtype`` with scales from its own blocks; ``order`` as in ``cast_to_fp8``.

    For blocks without a whole extent native kernels compute scales and cast in one pass.
    """
    if None not in blocks and _is_native(x, blocks, backend):
        scale = torch.empty(_grid(x, blocks), dtype=torch.float32, device=x.device)
        return _cast(x, scale, dtype, blocks, order, computes_scales=True, power_of_two=power_of_two)
    scale = scale_of(block_amax(x, blocks, backend=backend), dtype, power_of_two=power_of_two)
    return cast_to_fp8(x, scale, dtype, blocks, order=order, backend=backend)


def _is_native(x: Tensor, blocks: Blocks, backend: Backend) -> bool:
    """Whether a native kernel can cast ``x`` in these blocks."""
    if not x.numel() or any(size is not None and (size > TILE or size & (size - 1)) for size in blocks):
        return False
    if (TILE // (blocks.rows or TILE)) * (TILE // (blocks.columns or TILE)) > TILE_BLOCKS:
        return False
    return select_backend("fp8", backend, x.device.type, x.dtype) == "native"


def _cast(
    x: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
    blocks: Blocks,
    order: Order,
    *,
    computes_scales: bool = False,
    power_of_two: bool = False,
) -> Quantised:
    """The native ``cast_to_fp8``; with ``computes_scales`` the kernel writes the scales to ``scale``."""
    x = x.contiguous()
    data = None if order == "columns" else torch.empty_like(x, dtype=dtype)
    turned = None if order == "rows" else torch.empty_like(x.mT, dtype=dtype, memory_format=torch.contiguous_format)
    format_code = int(dtype == E5M2)
    native.call(
        "fp8_cast", x, *_sizes(x, blocks), x, format_code, int(computes_scales), int(power_of_two), scale, data, turned
    )
    if data is None:
        assert turned is not None, "order is one of rows, columns and both"
        return Quantised(turned.mT, scale, blocks)
    return Quantised(data, scale, blocks, None if turned is None else turned.mT)


def _sizes(x: Tensor, blocks: Blocks) -> tuple[int, ...]:
    """Number of matrices, rows, columns, and extents of blocks (0: whole extent)."""
    rows, columns = x.shape[-2:]
    return x.numel() // (rows * columns), rows, columns, blocks.rows or 0, blocks.columns or 0


def _grid(x: Tensor, blocks: Blocks) -> tuple[int, ...]:
    """Shape of the scales."""
    rows, columns = x.shape[-2:]
    return *x.shape[:-2], -(-rows // (blocks.rows or rows)), -(-columns // (blocks.columns or columns))


def lost(x: Tensor, quantised: Quantised) -> Tensor:
    """Number of elements of ``x`` that were clamped, that underflowed to 0, and that are not 0; float64 ``[3]``."""
    most = torch.finfo(quantised.data.dtype).max * (1.0 + 2.0**-20)  # tolerates the rounding of a scale
    scaled = x.abs().double() * spread_scale(quantised.scale, x.shape, quantised.blocks)
    zero = quantised.data.float() == 0
    present = x != 0
    return torch.stack([(scaled > most).sum(), (zero & present).sum(), present.sum()]).double()
