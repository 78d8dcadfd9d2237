"""Matrices in 8-bit floating point: amax, scale and cast in blocks, and products of such matrices.

A matrix x is held as ``data = cast(clamp(s x))`` with a scale s for each block of it, so that x is about data / s.
Formats: e4m3 (largest number 448, 3 bits of mantissa) and e5m2 (57,344, 2 bits), Micikevicius et al. 2022. Everything
here is plain torch and good for float64, too: in that precision a model in FP8 can be compared with itself in another
layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SMALLEST_AMAX = 1e-12
"""A block whose amax is less, such as one of zeros, has the scale of this one; torchao's constant."""
CUDA_MULTIPLE = 16
"""Of which the last two extents of a product must be multiples on GPUs (cuBLASLt)."""


class Blocks(NamedTuple):
    """The shape of the blocks that have a scale each; None: the whole extent."""

    rows: int | None = None
    columns: int | None = None

    def t(self) -> Blocks:
        """The blocks of the transposed matrix."""
        return Blocks(self.columns, self.rows)


WHOLE, ROWS, COLUMNS = Blocks(), Blocks(1, None), Blocks(None, 1)


@dataclass(frozen=True)
class Quantised:
    """``data`` ``[..., R, C]`` in FP8 with ``scale`` ``[..., R / rows, C / columns]`` (1 for a whole extent)."""

    data: Tensor
    scale: Tensor
    blocks: Blocks

    def t(self) -> Quantised:
        """The transposed matrix, a view."""
        return Quantised(self.data.mT, self.scale.mT, self.blocks.t())

    def __getitem__(self, index: int | slice) -> Quantised:
        """One of several matrices, or some rows of a matrix in blocks of a row."""
        scale = self.scale if isinstance(index, slice) and self.scale.shape[0] == 1 else self.scale[index]
        return Quantised(self.data[index], scale, self.blocks)

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """data / s in ``dtype``, with one rounding to float32 or wider and one to ``dtype``."""
        wide = torch.promote_types(dtype, torch.float32)
        inverse = spread(self.scale, self.data.shape, self.blocks).to(wide).reciprocal()
        return (self.data.to(wide) * inverse).to(dtype)


def block_amax(x: Tensor, blocks: Blocks) -> Tensor:
    """Largest absolute value of each block of ``x`` ``[..., R, C]``: ``[..., R / rows, C / columns]``; NaN where there
    is one, 0 where there is nothing. The last blocks may be smaller than the others."""
    rows, columns = x.shape[-2:]
    height, width = blocks.rows or max(rows, 1), blocks.columns or max(columns, 1)
    if not x.numel():
        shape = [1 if height >= rows else -(-rows // height), 1 if width >= columns else -(-columns // width)]
        return x.new_zeros(*x.shape[:-2], *shape)
    if rows % height or columns % width:
        x = torch.nn.functional.pad(x, (0, -columns % width, 0, -rows % height))
    return x.abs().unflatten(-1, (-1, width)).unflatten(-3, (-1, height)).amax(dim=(-3, -1))


def scale_of(amax: Tensor, dtype: torch.dtype, *, margin: int = 0, power_of_two: bool = False) -> Tensor:
    """s = largest(dtype) / amax / 2^margin in float32; ``power_of_two``: rounded down to one.

    NaN where amax is not finite, so that an overflow is never clamped away. Source: Micikevicius et al. 2022, section
    4; torchao ``float8_utils.amax_to_scale``.
    """
    scale = torch.finfo(dtype).max / amax.double().clamp_min(SMALLEST_AMAX) / 2.0**margin
    if power_of_two:
        scale = torch.ldexp(torch.full_like(scale, 0.5), torch.frexp(scale).exponent)
    return (scale + amax.double() * 0.0).float()


def spread(scale: Tensor, shape: torch.Size, blocks: Blocks) -> Tensor:
    """``scale`` with an element for each element of a matrix of ``shape``, or one for all along a dim."""
    for dim, size in ((-2, blocks.rows), (-1, blocks.columns)):
        if size is not None and size > 1:
            scale = scale.repeat_interleave(size, dim=dim).narrow(dim, 0, shape[dim])
    return scale


def cast(x: Tensor, scale: Tensor, dtype: torch.dtype, blocks: Blocks) -> Quantised:
    """``x`` with the given scales in ``dtype``. Clamped first: e5m2 would round 61,440 and more to infinity."""
    most = torch.finfo(dtype).max
    wide = torch.promote_types(x.dtype, torch.float32)
    scaled = x.to(wide) * spread(scale, x.shape, blocks).to(wide)
    return Quantised(scaled.clamp(-most, most).to(dtype), scale, blocks)


def quantise(x: Tensor, dtype: torch.dtype, blocks: Blocks = WHOLE, *, power_of_two: bool = False) -> Quantised:
    """``x`` in ``dtype`` with the scales of its own blocks."""
    return cast(x, scale_of(block_amax(x, blocks), dtype, power_of_two=power_of_two), dtype, blocks)


def lost(x: Tensor, quantised: Quantised) -> Tensor:
    """Of ``x``: elements that were clamped, elements that became 0, all elements but zeros; float64 ``[3]``."""
    most = torch.finfo(quantised.data.dtype).max * (1.0 + 2.0**-20)  # more than the rounding of a scale
    scaled = x.abs().double() * spread(quantised.scale, x.shape, quantised.blocks)
    zero = quantised.data.float() == 0
    present = x != 0
    return torch.stack([(scaled > most).sum(), (zero & present).sum(), present.sum()]).double()


def product(a: Quantised, b: Quantised, out_dtype: torch.dtype, *, fast_accumulation: bool = False) -> Tensor:
    """A B for ``a`` ``[M, K]`` and ``b`` ``[K, N]`` -> ``[M, N]``, summed in float32 (for float64 in that).

    One call of torch's ``_scaled_mm`` where ``is_scaled_product`` allows, else the product of the dequantised matrices:
    the same numbers. ``fast_accumulation`` (GPUs): sums of fewer bits, as is usual in forward.
    """
    if is_scaled_product(a, b, out_dtype):
        scale_a, scale_b = a.scale.reciprocal(), b.scale.reciprocal()
        kernel_dtype = out_dtype
        if a.blocks != WHOLE or b.blocks != WHOLE:
            scale_a = scale_a.expand(a.data.shape[0], 1).contiguous()
            scale_b = scale_b.expand(1, b.data.shape[1]).contiguous()
            if a.data.device.type == "cuda":
                kernel_dtype = torch.bfloat16  # the only one that torch's kernels by row return
        y = torch._scaled_mm(
            a.data.contiguous(),
            b.data.t().contiguous().t(),
            scale_a,
            scale_b,
            out_dtype=kernel_dtype,
            use_fast_accum=fast_accumulation,
        )
        return y.to(out_dtype)
    wide = torch.promote_types(out_dtype, torch.float32)
    # What is in blocks was scaled by powers of two, which bfloat16 holds exactly: GPUs multiply in that.
    narrow = wide if a.data.device.type == "cpu" or wide == torch.float64 else torch.bfloat16
    return a.dequantised(narrow).matmul(b.dequantised(narrow)).to(out_dtype)


def is_scaled_product(a: Quantised, b: Quantised, out_dtype: torch.dtype) -> bool:
    """Whether torch's product of FP8 matrices takes these: scales that leave the sum, and what the device has."""
    leaves_sum = a.blocks in (WHOLE, ROWS) and b.blocks in (WHOLE, COLUMNS)
    if not leaves_sum or not a.data.numel() or not b.data.numel():
        return False
    if out_dtype not in (torch.bfloat16, torch.float32):
        return False
    if a.data.device.type == "cpu":
        return TorchVersion(torch.__version__) >= "2.13"  # not tried with earlier ones
    if torch.cuda.get_device_capability(a.data.device) < (8, 9) or a.data.dtype == b.data.dtype == E5M2:
        return False
    return all(extent % CUDA_MULTIPLE == 0 for extent in b.data.shape)
