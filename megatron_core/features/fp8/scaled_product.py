"""Products of matrices in FP8: torch's product if the device supports it, else the product of dequantised matrices.

Both compute the same terms, summed in a different order. With scales of whole tensors, rows and columns torch's product
also runs on CPUs. With scales of blocks along the sum it runs only on GPUs; its result is therefore compared with the
dequantised product before the first use.

Layouts: torch's ``aten/src/ATen/native/cuda/ScaledBlas.cpp``, and cuBLAS on scaling by blocks of 1 x 128, 128 x 128 and
1 x 32 elements.
"""

import warnings
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.torch_version import TorchVersion

from megatron_core.features.fp8.casts import COLUMNS, E4M3, E5M2, ROWS, WHOLE, Blocks, Quantised, quantise
from megatron_core.features.fp8.settings import BLOCK, SMALL_BLOCK

CUDA_MULTIPLE = 16
"""On GPUs the last two extents of a product must be multiples of this number (cuBLASLt)."""
KINDS = {
    (Blocks(1, BLOCK), Blocks(BLOCK, BLOCK)): ("BlockWise1x128", "BlockWise128x128"),
    (Blocks(1, BLOCK), Blocks(BLOCK, 1)): ("BlockWise1x128", "BlockWise1x128"),
    (Blocks(1, SMALL_BLOCK), Blocks(SMALL_BLOCK, 1)): ("BlockWise1x32", "BlockWise1x32"),
}
"""torch's names of the supported pairs of block shapes."""
UNFIT = "FP8 products that torch does not support run on dequantised matrices and are not faster"


class Operands(NamedTuple):
    """Operands of torch's blockwise product: matrices contiguous along the sum, and scales to multiply them by."""

    a: Tensor
    b: Tensor
    scale_a: Tensor
    scale_b: Tensor
    kinds: tuple[str, str]


def product(a: Quantised, b: Quantised, out_dtype: torch.dtype, *, fast_accumulation: bool = False) -> Tensor:
    """A B for ``a`` ``[M, K]`` and ``b`` ``[K, N]`` -> ``[M, N]``, summed in float32 (float64 for float64).

    One call of torch if ``is_scaled_product`` or ``is_block_product`` holds, else the product of the dequantised
    matrices, with the same terms. ``fast_accumulation`` (only on GPUs and for scales that are constant along the sum)
    accumulates in lower precision, as is usual in forward.
    """
    if is_scaled_product(a, b, out_dtype):
        return _scaled_product(a, b, out_dtype, fast_accumulation=fast_accumulation).to(out_dtype)
    if (a.blocks, b.blocks) in KINDS and scaled_product_unavailable_reason(a.blocks.columns, a.data.device) is None:
        if is_block_product(a, b, out_dtype):
            return block_product(block_operands(a, b), out_dtype)
        warnings.warn(UNFIT, stacklevel=2)
    return dequantised_product(a, b, out_dtype)


def add_product_(total: Tensor, a: Quantised, b: Quantised) -> None:
    """total += A B, with a product in the dtype of ``total``; see ``product``."""
    if is_scaled_product(a, b, total.dtype):
        # The sum converts a result in 16 bits, exactly.
        total.add_(_scaled_product(a, b, total.dtype, fast_accumulation=False))
    else:
        total.add_(product(a, b, total.dtype))


def _scaled_product(a: Quantised, b: Quantised, out_dtype: torch.dtype, *, fast_accumulation: bool) -> Tensor:
    """torch's product, in ``out_dtype`` or, for scales of rows on GPUs, in bfloat16."""
    scale_a = a.inverse
    scale_b = b.inverse
    kernel_dtype = out_dtype
    if a.blocks != WHOLE or b.blocks != WHOLE:
        # Transposed scales have other strides, although a dim has size 1, and torch compares strides.
        scale_a = scale_a.expand(a.data.shape[0], 1).flatten().contiguous()[:, None]
        scale_b = scale_b.expand(1, b.data.shape[1]).flatten().contiguous()[None]
        if a.data.device.type == "cuda":
            kernel_dtype = torch.bfloat16  # the only output dtype of torch's rowwise kernels
    left = a.data.contiguous()
    right = b.data.t().contiguous().t()
    return torch._scaled_mm(left, right, scale_a, scale_b, out_dtype=kernel_dtype, use_fast_accum=fast_accumulation)


def dequantised_product(a: Quantised, b: Quantised, out_dtype: torch.dtype) -> Tensor:
    """``product`` with dequantised matrices."""
    wide = torch.promote_types(out_dtype, torch.float32)
    if a.data.device.type == "cpu" or wide == torch.float64:
        return a.dequantised(wide).matmul(b.dequantised(wide)).to(out_dtype)
    # GPUs multiply in bfloat16, which represents FP8 exactly. Scales that are constant along the sum are applied after
    # it; scales of blocks are powers of two, so that dequantising to bfloat16 is exact, too.
    if _leaves_sum(a, b):
        y = torch.mm(a.data.to(torch.bfloat16), b.data.to(torch.bfloat16), out_dtype=torch.float32)
        return (y * a.inverse * b.inverse).to(out_dtype)
    y = torch.mm(a.dequantised(torch.bfloat16), b.dequantised(torch.bfloat16), out_dtype=torch.float32)
    return y.to(out_dtype)


def _leaves_sum(a: Quantised, b: Quantised) -> bool:
    """Whether all terms of an element of A B have the same scale."""
    return a.blocks in (WHOLE, ROWS) and b.blocks in (WHOLE, COLUMNS)


def is_scaled_product(a: Quantised, b: Quantised, out_dtype: torch.dtype) -> bool:
    """Whether torch's FP8 product supports these operands on their device; scales must be constant along the sum."""
    if not _leaves_sum(a, b) or not a.data.numel() or not b.data.numel():
        return False
    if scaled_product_unavailable_reason(None, a.data.device) is not None:
        return False
    fits = out_dtype in (torch.bfloat16, torch.float32)
    if a.data.device.type == "cpu":
        return fits
    # torch's rowwise kernels support e5m2 only on the left.
    fits = fits and (b.data.dtype != E5M2 or (a.data.dtype != E5M2 and a.blocks == b.blocks == WHOLE))
    fits = fits and all(extent % CUDA_MULTIPLE == 0 for extent in b.data.shape)
    if not fits:
        warnings.warn(UNFIT, stacklevel=3)
    return fits


def is_block_product(a: Quantised, b: Quantised, out_dtype: torch.dtype) -> bool:
    """Whether torch's blockwise product, if available, supports these operands: whole blocks, not both in e5m2."""
    scalings = KINDS.get((a.blocks, b.blocks))
    if scalings is None or not a.data.numel() or not b.data.numel() or a.data.dtype == b.data.dtype == E5M2:
        return False
    rows = a.data.shape[0]
    along, columns = b.data.shape
    multiples = (1, SMALL_BLOCK, CUDA_MULTIPLE)
    if a.blocks.columns == BLOCK:
        multiples = (CUDA_MULTIPLE, BLOCK, b.blocks.columns if b.blocks.columns == BLOCK else CUDA_MULTIPLE)
    fits = all(extent % multiple == 0 for extent, multiple in zip((rows, along, columns), multiples, strict=True))
    return fits and out_dtype in (torch.bfloat16, torch.float32)


def block_operands(a: Quantised, b: Quantised) -> Operands:
    """The operands of ``block_product`` for ``a`` ``[M, K]`` and ``b`` ``[K, N]``. The scales are

    * for 1 x 128 elements: float32 ``[M, K / 128]`` and ``[N, K / 128]``, column-major,
    * for 128 x 128 elements: float32 ``[L, N / 128]``, column-major, where L is K / 128 rounded up to a multiple of 4,
    * for 1 x 32 elements: e8m0, flat, in tiles of 128 rows by 4 blocks; in a tile the scale of row r and block c is at
      16 (r mod 32) + 4 (r div 32) + c; padded with zeros.
    """
    turned = b.t()
    kinds = KINDS[a.blocks, b.blocks]
    return Operands(a.data.contiguous(), turned.data.contiguous().t(), _block_scales(a), _block_scales(turned), kinds)


def _block_scales(x: Quantised) -> Tensor:
    inverse = x.inverse
    rows, blocks = inverse.shape
    if x.blocks.columns == SMALL_BLOCK:
        filled = functional.pad(inverse, (0, -blocks % 4, 0, -rows % 128))
        tiles = filled.unflatten(1, (-1, 4)).unflatten(0, (-1, 4, 32)).permute(0, 3, 2, 1, 4)
        return tiles.flatten().to(torch.float8_e8m0fnu)
    if x.blocks.rows == 1:
        # Flattened first: torch compares the strides of a dim of size 1, too.
        return inverse.t().flatten().contiguous().view(blocks, rows).t()
    filled = functional.pad(inverse, (0, -blocks % 4)) if blocks % 4 else inverse
    return filled.contiguous().t()


def block_product(operands: Operands, out_dtype: torch.dtype) -> Tensor:
    """torch's blockwise product."""
    left, right = (functional.ScalingType.__members__[scaling] for scaling in operands.kinds)
    is_small = operands.scale_a.dtype == torch.float8_e8m0fnu
    swizzle = functional.SwizzleType.SWIZZLE_32_4_4 if is_small else functional.SwizzleType.NO_SWIZZLE
    return functional.scaled_mm(
        operands.a,
        operands.b,
        operands.scale_a,
        left,
        operands.scale_b,
        right,
        swizzle_a=swizzle,
        swizzle_b=swizzle,
        output_dtype=out_dtype,
    )


@cache
def scaled_product_unavailable_reason(block: int | None, device: torch.device) -> str | None:
    """Why a device cannot run torch's product with scales of ``block`` elements (None: scales of whole extents); None
    if it can. The first call for blocks compares torch's product with the dequantised one."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    reason = missing(block, capability, torch.version.cuda, torch.__version__)
    return reason if reason is not None or block is None else _wrong(block, device)


def missing(block: int | None, capability: tuple[int, int] | None, cuda: str | None, version: str) -> str | None:
    """Why torch's product with scales of ``block`` elements is not supported on a GPU of this compute capability (None:
    on a CPU) with torch's CUDA and version; None if it is supported."""
    if block is None and capability is None:  # earlier versions are untested
        is_supported = TorchVersion(version) >= "2.13"
        return None if is_supported else f"torch {version} does not have it on a CPU; use 2.13 or later"
    if capability is None or cuda is None:
        return "torch has this product only on NVIDIA GPUs"
    if block is not None and TorchVersion(version) < "2.10":
        return f"torch {version} does not have this product; use 2.10 or later"
    is_large = block == BLOCK
    if capability[0] != 9 if is_large else capability < ((8, 9) if block is None else (10, 0)):
        of_small = "8.9 and later" if block is None else "10.0 and later"
        legal = "9.0 alone" if is_large else of_small
        gpu_capability = ".".join(map(str, capability))
        return f"torch has this product for compute capability {legal}, and this GPU's is {gpu_capability}"
    if block is not None and TorchVersion(cuda) < (needed := "12.9" if is_large else "12.8"):
        return f"torch was built with CUDA {cuda}, but this product needs {needed}"
    return None


def _wrong(block: int, device: torch.device) -> str | None:
    """Describe how torch's product on the device differs from the dequantised product; None if they agree."""
    draw = partial(torch.randn, generator=torch.Generator("cpu").manual_seed(1), device="cpu")
    rows = (144, 1)
    along = (5, BLOCK)
    columns = (2, BLOCK)
    # Blocks have different magnitudes, but all terms of a sum have the same magnitude.
    of_rows, of_sum, of_columns = (
        (10.0 ** draw(blocks, 1)).expand(blocks, size).flatten() for blocks, size in (rows, along, columns)
    )
    x = draw(len(of_rows), len(of_sum)) * of_rows[:, None] * of_sum
    y = draw(len(of_sum), len(of_columns)) * of_columns / of_sum[:, None]
    size = (of_rows[:, None] * of_columns).to(device)
    for left, right in (pair for pair in KINDS if pair[0].columns == block):
        a, b = (
            quantise(matrix.to(device), E4M3, blocks, power_of_two=True) for matrix, blocks in ((x, left), (y, right))
        )
        expected = dequantised_product(a, b, torch.float32) / size
        try:
            computed = block_product(block_operands(a, b), torch.float32) / size
        except (RuntimeError, ValueError) as error:
            return f"torch's product fails here: {str(error).splitlines()[0]}"
        off = ((computed - expected).abs().amax() / expected.abs().amax()).item()
        if not off <= 2.0**-7:
            return f"torch's product of blocks {left} and {right} is off by {off:.1%} here"
    return None
