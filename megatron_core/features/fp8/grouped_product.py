"""Products of groups of rows with a matrix per group in FP8: torch's grouped product if the GPU supports it.

torch's kernel has a scale for each row and each column (``aten/src/ATen/native/cuda/GroupedBlas.cpp``), so it serves
the recipes tensorwise, delayed and rowwise. Elsewhere the product of each group is computed alone, which is the
definition. The result of torch is compared with it before the first use.
"""

import warnings
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from megatron_core.features.experts.grouped import ends_of, runs
from megatron_core.features.fp8.casts import COLUMNS, E4M3, ROWS, WHOLE, Quantised, quantise
from megatron_core.features.fp8.scaled_product import CUDA_MULTIPLE, dequantised_product, product


def grouped_fp8_product(rows: Quantised, matrices: Quantised, counts: Sequence[int], dtype: torch.dtype) -> Tensor:
    """y_r = x_r W_e in ``dtype``: ``rows`` ``[R, K]`` with scales per row or one scale, ``matrices`` ``[E, K, N]``.

    Row r belongs to group e; ``counts`` as in ``features.experts.grouped``. One call of torch if ``dtype`` is
    bfloat16, the only dtype that its product returns, and ``is_grouped_scaled`` holds.
    """
    if dtype == torch.bfloat16 and is_grouped_scaled(rows, matrices):
        return _scaled_grouped_mm(rows, matrices, counts)
    y = torch.empty(len(rows.data), matrices.data.shape[-1], dtype=dtype, device=rows.data.device)
    for group, run in enumerate(runs(counts)):
        if run.start < run.stop:
            y[run] = product(rows[run], matrices[group], dtype)
    return y


def add_fp8_weight_grads_(total: Tensor, grad_y: Quantised, x: Quantised, counts: Sequence[int]) -> None:
    """total_e += grad_y_e^T x_e for ``[R, O]`` and ``[R, I]`` with one scale each, ``total`` ``[E, O, I]``.

    On GPUs the rows of each group are filled with zeros to a multiple of 16, which torch's product requires.
    """
    for run, expert_total in zip(runs(counts), total, strict=True):
        if run.start < run.stop:
            expert_total.add_(product(_filled(grad_y[run]).t(), _filled(x[run]), expert_total.dtype))


def _filled(rows: Quantised) -> Quantised:
    missing = -len(rows.data) % CUDA_MULTIPLE
    if not missing or not rows.data.is_cuda:
        return rows
    data = torch.nn.functional.pad(rows.data.view(torch.uint8), (0, 0, 0, missing)).view(rows.data.dtype)
    return Quantised(data, rows.scale, rows.blocks)


def is_grouped_scaled(rows: Quantised, matrices: Quantised) -> bool:
    """Whether torch's grouped product supports these: e4m3, extents divisible by 16, scales constant along the sum."""
    if rows.blocks not in (WHOLE, ROWS) or matrices.blocks not in (WHOLE, COLUMNS) or not len(rows.data):
        return False
    fits = rows.data.dtype == matrices.data.dtype == E4M3
    fits = fits and all(extent % CUDA_MULTIPLE == 0 for extent in matrices.data.shape[1:])
    return fits and grouped_unavailable_reason(rows.data.device) is None


def _scaled_grouped_mm(rows: Quantised, matrices: Quantised, counts: Sequence[int]) -> Tensor:
    """torch's product in bfloat16, its only output dtype: rows row-major, matrices column-major, scales to multiply by
    as float32 ``[R]`` and ``[E, N]``."""
    groups, _, columns = matrices.data.shape
    right = matrices.data.mT.contiguous().mT
    scale_a = rows.inverse.expand(len(rows.data), 1).reshape(-1).contiguous()
    scale_b = matrices.inverse.expand(groups, 1, columns).reshape(groups, columns).contiguous()
    ends = ends_of(counts, rows.data.device)
    return torch._scaled_grouped_mm(
        rows.data.contiguous(), right, scale_a, scale_b, offs=ends, out_dtype=torch.bfloat16
    )


@cache
def grouped_unavailable_reason(device: torch.device) -> str | None:
    """Why a device cannot run torch's grouped product in FP8; None if it can, which the first call finds by comparing
    it with the products of dequantised matrices."""
    if device.type != "cuda" or torch.version.cuda is None:
        return "torch has this product only on NVIDIA GPUs"
    capability = torch.cuda.get_device_capability(device)
    if capability[0] != 9:
        return f"torch has this product for compute capability 9.0, and this GPU's is {capability[0]}.{capability[1]}"
    reason = _wrong(device)
    if reason is not None:
        warnings.warn(f"experts in FP8 are multiplied one by one: {reason}", stacklevel=2)
    return reason


def _wrong(device: torch.device) -> str | None:
    """Describe how torch's grouped product on the device differs from the definition; None if they agree."""
    generator = torch.Generator("cpu").manual_seed(1)
    counts = [5, 0, 48]
    along, columns = (64, 32)
    x = torch.randn(sum(counts), along, generator=generator, device="cpu")
    weight = torch.randn(len(counts), along, columns, generator=generator, device="cpu")
    x *= 10.0 ** torch.randn(len(x), 1, generator=generator, device="cpu")
    for of_rows, of_matrices in ((ROWS, COLUMNS), (ROWS, WHOLE), (WHOLE, WHOLE)):
        rows = quantise(x.to(device), E4M3, of_rows)
        matrices = quantise(weight.to(device), E4M3, of_matrices)
        expected = torch.cat(
            [dequantised_product(rows[run], matrices[number], torch.float32) for number, run in enumerate(runs(counts))]
        )
        try:
            computed = _scaled_grouped_mm(rows, matrices, counts).float()
        except (RuntimeError, ValueError, NotImplementedError) as error:
            return f"torch's grouped product fails here: {str(error).splitlines()[0]}"
        size = expected.abs().amax(1, keepdim=True)
        off = ((computed - expected).abs() / size).amax().item()
        if not off <= 2.0**-7:
            return f"torch's grouped product with scales of {of_rows} and {of_matrices} is off by {off:.1%} here"
    return None
