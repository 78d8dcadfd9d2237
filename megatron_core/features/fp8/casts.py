"""Matrices in 8-bit floating point: amax, scale and cast in blocks.

A matrix x is stored as ``data = cast(clamp(s x))`` with a scale s per block, so that x is approximately data / s.
Formats: e4m3 (largest number 448, 3 bits of mantissa) and e5m2 (57,344, 2 bits), Micikevicius et al. 2022. All
functions work in plain torch and also support float64, so that an FP8 model can be compared with itself in another
layout. The casts also have native kernels, which read a matrix once or twice and write the memory orders for products.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_core.features.fp8.native_casts import (
    GIVEN,
    ONE,
    PARTS,
    TILE,
    TILE_BLOCKS,
    Order,
    Source,
    amaxes_in_parts,
    cast_orders,
    part_grid,
    scale_grid,
)
from megatron_core.ops.backend import Backend, select_backend

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
SMALLEST_AMAX = 1e-12
"""Lower bound of amax in the computation of a scale, for example for a block of zeros; torchao's constant."""


class Blocks(NamedTuple):
    """Shape of the blocks with one scale each; None: the whole extent."""

    rows: int | None = None
    columns: int | None = None

    def t(self) -> "Blocks":
        """The blocks of the transposed matrix."""
        return Blocks(self.columns, self.rows)


WHOLE = Blocks()
ROWS = Blocks(1, None)
COLUMNS = Blocks(None, 1)


class Scales(NamedTuple):
    """Scales of a matrix's blocks, and 1 / scale, which products read; None: computed when it is needed."""

    scale: Tensor
    inverse: Tensor | None = None


@dataclass(frozen=True)
class Quantised:
    """``data`` ``[..., R, C]`` in FP8 with ``scale`` ``[..., R / rows, C / columns]`` (1 for a whole extent)."""

    data: Tensor
    scale: Tensor
    blocks: Blocks
    known_inverse: Tensor | None = None
    """1 / scale, if a kernel has written it."""

    @property
    def inverse(self) -> Tensor:
        """1 / scale."""
        return self.scale.reciprocal() if self.known_inverse is None else self.known_inverse

    @property
    def scales(self) -> Scales:
        """The scales, for another cast of the same matrix."""
        return Scales(self.scale, self.known_inverse)

    def t(self) -> "Quantised":
        """The transposed matrix, a view."""
        inverse = None if self.known_inverse is None else self.known_inverse.mT
        return Quantised(self.data.mT, self.scale.mT, self.blocks.t(), inverse)

    def __getitem__(self, index: int | slice) -> "Quantised":
        """One of several matrices, or some rows of a matrix whose blocks are single rows."""
        if isinstance(index, slice) and self.scale.shape[0] == 1:
            return Quantised(self.data[index], self.scale, self.blocks, self.known_inverse)
        # Products read vectors of scales from aligned addresses, and a part of a vector may begin anywhere.
        is_aligned = isinstance(index, int) and None in self.blocks
        inverse = self.known_inverse[index] if self.known_inverse is not None and is_aligned else None
        return Quantised(self.data[index], self.scale[index], self.blocks, inverse)

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
    if _is_native(x, [blocks], backend):
        (amaxes,) = amaxes_in_parts(x, part_grid(x, [blocks]), [blocks])
        return _complete(amaxes, blocks)
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
    x: Tensor,
    scales: Scales | Tensor,
    dtype: torch.dtype,
    blocks: Blocks,
    *,
    order: Order = "rows",
    backend: Backend = "auto",
) -> Quantised:
    """Cast ``x`` with the given scales to ``dtype``. Values are clamped: e5m2 would round 61,440 and more to infinity.

    Only native kernels apply ``order``; otherwise the memory order is that of ``x``.
    """
    scale, inverse = (scales, None) if isinstance(scales, Tensor) else scales
    if _is_native(x, [blocks], backend):
        numbers = scale.expand(scale_grid(x, blocks)).contiguous()
        data = cast_orders(x, dtype, {order: Source(blocks, GIVEN, numbers)})[order].data
        return Quantised(data, scale, blocks, inverse)
    most = torch.finfo(dtype).max
    wide = torch.promote_types(x.dtype, torch.float32)
    scaled = x.to(wide) * spread_scale(scale, x.shape, blocks).to(wide)
    return Quantised(scaled.clamp(-most, most).to(dtype), scale, blocks, inverse)


def cast_recording(
    x: Tensor,
    scales: Scales,
    dtype: torch.dtype,
    orders: Sequence[Order],
    recorded: Tensor | None,
    *,
    backend: Backend = "auto",
) -> dict[Order, Quantised]:
    """Cast ``x`` with one scale, known before, and raise the number ``recorded`` to its largest absolute value.

    Values that are not finite become NaN instead of being clamped; the reference makes all values NaN.
    """
    grid = scale_grid(x, WHOLE)
    scale = scales.scale.expand(grid)
    if _is_native(x, [WHOLE], backend):
        inverse = None if scales.inverse is None else scales.inverse.expand(grid)
        sources = {order: Source(WHOLE, ONE, scales.scale) for order in orders}
        # Only with a place for the largest value does the kernel look for values that are not finite.
        place = x.new_empty(1, dtype=torch.float32) if recorded is None else recorded
        casts = cast_orders(x, dtype, sources, recorded=place)
        return {order: Quantised(cast.data, scale, WHOLE, inverse) for order, cast in casts.items()}
    amax = block_amax(x, WHOLE, backend="reference")
    if recorded is not None and amax.numel():
        recorded.copy_(torch.maximum(recorded, amax.amax().to(recorded.dtype)))
    quantised = cast_to_fp8(x, scale + (amax * 0.0).float(), dtype, WHOLE, backend="reference")
    return dict.fromkeys(orders, quantised)


def quantise(
    x: Tensor,
    dtype: torch.dtype,
    blocks: Blocks = WHOLE,
    *,
    power_of_two: bool = False,
    order: Order = "rows",
    backend: Backend = "auto",
) -> Quantised:
    """Cast ``x`` to ``dtype`` with scales from its own blocks; ``order`` as in ``cast_to_fp8``."""
    return quantise_orders(x, dtype, {order: blocks}, power_of_two=power_of_two, backend=backend)[order]


def quantise_orders(
    x: Tensor,
    dtype: torch.dtype,
    orders: Mapping[Order, Blocks],
    *,
    power_of_two: bool = False,
    backend: Backend = "auto",
    change_amax: Callable[[Tensor, Blocks], None] | None = None,
    amax: Tensor | None = None,
) -> dict[Order, Quantised]:
    """Cast ``x`` to each memory order of ``orders`` with scales from the blocks of that order.

    ``change_amax(amax, blocks)``, if given, changes the largest numbers of blocks with a whole extent, before scales
    are computed from them. ``amax``: that of ``x``, from ``amaxes_of_list``, for whole blocks. Native kernels need
    one launch without whole extents or with ``amax``, else two, or more with ``change_amax``.
    """
    if not _is_native(x, list(orders.values()), backend):
        by_blocks = {
            blocks: _quantise_reference(x, dtype, blocks, power_of_two, backend, change_amax)
            for blocks in dict.fromkeys(orders.values())
        }
        return {order: by_blocks[blocks] for order, blocks in orders.items()}
    with_parts = list(dict.fromkeys(blocks for blocks in orders.values() if None in blocks))
    grid = part_grid(x, with_parts) if amax is None else (len(amax), 1)
    amaxes = {WHOLE: amax} if amax is not None else {}
    if with_parts and amax is None:
        amaxes = dict(zip(with_parts, amaxes_in_parts(x, grid, with_parts), strict=True))
    if change_amax is not None:
        for blocks, in_parts in amaxes.items():
            amaxes[blocks] = _complete(in_parts, blocks)
            change_amax(amaxes[blocks], blocks)
        grid = (1, 1)
    sources = {
        order: Source(blocks, PARTS, amaxes[blocks]) if blocks in amaxes else Source(blocks)
        for order, blocks in orders.items()
    }
    casts = cast_orders(x, dtype, sources, power_of_two=power_of_two, grid=grid)
    return {
        order: Quantised(cast.data, cast.scale, orders[order], cast.inverse)
        for order, cast in casts.items()
        if cast.scale is not None
    }


def _quantise_reference(
    x: Tensor,
    dtype: torch.dtype,
    blocks: Blocks,
    power_of_two: bool,
    backend: Backend,
    change_amax: Callable[[Tensor, Blocks], None] | None,
) -> Quantised:
    amax = block_amax(x, blocks, backend=backend)
    amax = amax.to(torch.promote_types(amax.dtype, torch.float32))
    if change_amax is not None and None in blocks:
        change_amax(amax, blocks)
    return cast_to_fp8(x, scale_of(amax, dtype, power_of_two=power_of_two), dtype, blocks, backend=backend)


def _complete(amaxes: Tensor, blocks: Blocks) -> Tensor:
    """Combine the parts of whole extents."""
    undivided = [dim for dim, size in ((-2, blocks.rows), (-1, blocks.columns)) if size is None]
    return amaxes.amax(undivided, keepdim=True) if undivided else amaxes


def _is_native(x: Tensor, kinds: Sequence[Blocks], backend: Backend) -> bool:
    """Whether native kernels can cast ``x`` in these blocks."""
    for blocks in kinds:
        if not x.numel() or any(size is not None and (size > TILE or size & (size - 1)) for size in blocks):
            return False
        if (TILE // (blocks.rows or TILE)) * (TILE // (blocks.columns or TILE)) > TILE_BLOCKS:
            return False
    return select_backend("fp8", backend, x.device.type, x.dtype) == "native"


def lost(x: Tensor, quantised: Quantised) -> Tensor:
    """Number of elements of ``x`` that were clamped, that underflowed to 0, and that are not 0; float64 ``[3]``."""
    most = torch.finfo(quantised.data.dtype).max * (1.0 + 2.0**-20)  # tolerates the rounding of a scale
    scaled = x.abs().double() * spread_scale(quantised.scale, x.shape, quantised.blocks)
    zero = quantised.data.float() == 0
    present = x != 0
    return torch.stack([(scaled > most).sum(), (zero & present).sum(), present.sum()]).double()
