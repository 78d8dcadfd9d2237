"""Operators that torch has only for CUDA, on memory of the CPU, with the restrictions of their kernels."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


def _addmm(c: Tensor, a: Tensor, b: Tensor, out_dtype: torch.dtype, *, out: Tensor) -> Tensor:
    return out.copy_(c + a.to(out_dtype) @ b.to(out_dtype))


def _check_flash(*inputs: Tensor) -> None:
    """RuntimeError for calls that torch's flash attention refuses (``flash_attn/flash_api.cpp``)."""
    query, key, value, *others = inputs
    if query.dtype not in (torch.float16, torch.bfloat16) or any(x.dtype != query.dtype for x in (key, value, *others)):
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type, the same for all")
    if any(x.stride(-1) != 1 for x in (query, key, value)):
        raise RuntimeError("Input tensor must have contiguous last dimension")
    if query.shape[-1] % 8 or query.shape[-1] > 256 or key.shape[-1] != query.shape[-1] != value.shape[-1]:
        raise RuntimeError(
            "head_size must be a multiple of 8, this is ensured by padding! At most 256, and one for all"
        )


def _flash(
    query: Tensor, key: Tensor, value: Tensor, drop: float = 0.0, causal: bool = False, debug: bool = False
) -> Any:
    _check_flash(query, key, value)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, drop, causal)
    return out, lse, None, None, query.shape[2], key.shape[2], *[torch.empty(0)] * 3


def _flash_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, *rest: Any
) -> Any:
    _check_flash(query, key, value, grad, out)
    _, _, _, _, drop, causal, _, _ = rest
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, query, key, value, out, lse, drop, causal
    )


def _scaled_mm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *rest: Any) -> Tensor:
    """A GPU with the restrictions of ``ScaledBlas.cpp`` and ``RowwiseScaledMM.cu``."""
    out_dtype, rows = rest[2], scale_a.numel() > 1 or scale_b.numel() > 1
    e5m2 = [x.dtype == torch.float8_e5m2 for x in (a, b)]
    if a.stride() != (a.shape[1], 1) or b.stride() != (1, b.shape[0]) or any(extent % 16 for extent in b.shape):
        raise RuntimeError("mat1 must be row major, mat2 column major, and trailing dimensions divisible by 16")
    if rows and not (scale_a.shape == (len(a), 1) and scale_b.shape == (1, b.shape[1]) and not e5m2[1]):
        raise RuntimeError("by row scales are [M, 1] and [1, N], and the second matrix is in e4m3")
    if all(e5m2) or (rows and out_dtype != torch.bfloat16):
        raise RuntimeError("no product of two matrices in e5m2, and by row none that returns other than bfloat16")
    return ((a.float() * scale_a) @ (b.float() * scale_b)).to(out_dtype)


def _scaled_mm_v2(
    a: Tensor, b: Tensor, scale_a: list[Tensor], kind_a: list[int], _: Any, scale_b: list[Tensor], kind_b: list[int],
    *rest: Any,
) -> Tensor:  # fmt: skip
    """Products with scales of blocks of 128: rows of 1 x 128 elements column-major, 128 x 128 padded to 4 blocks."""
    kinds = [torch.nn.functional.ScalingType(kind[0]).name for kind in (kind_a, kind_b)]
    rows, along, columns = len(a), a.shape[1], b.shape[1]
    blocks = along // 128
    if a.stride() != (along, 1) or b.stride() != (1, along) or rows % 16 or columns % 16 or along % 128:
        raise RuntimeError("mat1 must be row major, mat2 column major, and extents divisible by 16 and blocks")
    wide = []
    for matrix, scale, kind, length in ((a, scale_a[0], kinds[0], rows), (b.t(), scale_b[0], kinds[1], columns)):
        if kind == "BlockWise1x128":
            if scale.shape != (length, blocks) or scale.stride() != (1, length):
                raise RuntimeError(f"scales of 1 x 128 have shape {scale.shape} and strides {scale.stride()}")
            by = scale.repeat_interleave(128, 1)
        else:
            padded = -(-blocks // 4) * 4
            if scale.shape != (padded, length // 128) or scale.stride() != (1, padded):
                raise RuntimeError(f"scales of 128 x 128 have shape {scale.shape} and strides {scale.stride()}")
            by = scale.t()[:, :blocks].repeat_interleave(128, 0).repeat_interleave(128, 1)
        wide.append(matrix.float() * by)
    return (wide[0] @ wide[1].t()).to(rest[2])


def _checked_by_torch(function: Any, *given: Any) -> None:
    """Apply torch's checks of shapes, strides and dtypes on the meta device, which are those of CUDA."""
    function(*(torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") if isinstance(x, Tensor) else x
               for x in given))  # fmt: skip


def _groups(a: Tensor, b: Tensor, ends: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The factors of each group, of rows of ``a``, or of columns of ``a`` and rows of ``b``."""
    begins = [0, *ends.tolist()]
    for number, (start, stop) in enumerate(pairwise(begins)):
        yield (a[start:stop], b[number]) if b.dim() == 3 else (a[:, start:stop], b[start:stop])


def _joined(products: list[Tensor], b: Tensor) -> Tensor:
    return torch.cat(products) if b.dim() == 3 else torch.stack(products)


def _grouped_mm(a: Tensor, b: Tensor, ends: Tensor, *rest: Any) -> Tensor:
    """The results of a CPU; a group without rows leaves the memory of its sum unwritten."""
    if a.dtype == torch.bfloat16:  # else torch computes one product after another
        _checked_by_torch(torch.ops.aten._grouped_mm.default, a, b, ends, *rest)
    found = torch.ops.aten._grouped_mm.default(a, b, ends, *rest)
    if b.dim() == 2:
        found[ends.diff(prepend=ends.new_zeros(1)) == 0] = torch.nan
    return found


def _scaled_grouped_mm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, ends: Tensor, *rest: Any) -> Tensor:
    """A GPU of compute capability 9.0: rows with their scales, matrices with a scale per column."""
    _checked_by_torch(torch.ops.aten._scaled_grouped_mm.default, a, b, scale_a, scale_b, ends, *rest)
    if any(extent % 16 for extent in b.shape[1:]):
        raise RuntimeError("trailing dimensions must be divisible by 16")
    wide = a.float() * scale_a[:, None], b.float() * scale_b[:, None]
    return _joined([left @ right for left, right in _groups(*wide, ends)], b).to(torch.bfloat16)


def _by_document(starts: Tensor, window: list[int], *tokens: Tensor) -> list[Tensor]:
    """Attention of queries, keys and values ``[tokens, heads, d]`` in float32, one document after another; with the
    gradient of the output as fourth, the three gradients."""
    parts: list[list[Tensor]] = []
    for start, stop in zip(starts.tolist(), starts.tolist()[1:], strict=False):
        q, k, v, *grads = (x[start:stop].float().transpose(0, 1) for x in tokens)
        many, scale = len(q) // len(k), q.shape[-1] ** -0.5
        k, v = (x.repeat_interleave(many, dim=0) for x in (k, v))
        seen = torch.ones(stop - start, stop - start, dtype=torch.bool).tril(window[1])
        seen = seen if window[0] < 0 else seen.triu(-window[0])
        probs = (q @ k.mT * scale).masked_fill(~seen, -torch.inf).softmax(-1)
        found = [probs @ v]
        for grad in grads:
            of_probs = grad @ v.mT
            of_scores = scale * probs * (of_probs - (of_probs * probs).sum(-1, keepdim=True))
            of_keys, of_values = (x.unflatten(0, (-1, many)).sum(1) for x in (of_scores.mT @ q, probs.mT @ grad))
            found = [of_scores @ k, of_keys, of_values]
        parts.append([x.transpose(0, 1) for x in found])
    return [torch.cat(each).to(tokens[0].dtype) for each in zip(*parts, strict=True)]


def _varlen(query: Tensor, key: Tensor, value: Tensor, starts: Tensor, same: Tensor, most: int, *rest: Any) -> Any:
    """torch's variable-length attention, with the restrictions of its flash kernel (``flash_api.cpp``)."""
    most_keys, _, scale, window = rest[0], *rest[1:4]
    lengths = starts.diff()
    if starts.dtype != torch.int32 or not torch.equal(starts, same) or starts[-1] != len(query) or scale is not None:
        raise RuntimeError("cu_seqlens_q must have dtype int32, and end with the number of tokens")
    if not most == most_keys == int(lengths.max()):
        raise RuntimeError("max_q is the length of the longest sequence")
    _check_flash(query, key, value)
    (out,) = _by_document(starts, window, query, key, value)
    return out, torch.zeros(query.shape[1], len(query)), torch.zeros(2, dtype=torch.uint64)


def _varlen_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Any:
    _, _, starts, _, _, _, _, _, _, window = rest
    _check_flash(query, key, value, grad)
    return tuple(_by_document(starts, window, query, key, value, grad))


FUNCTIONS = {
    "torch_attn._varlen_attn.default": _varlen,
    "torch_attn._varlen_attn_backward.default": _varlen_backward,
    "aten._scaled_mm.default": _scaled_mm,
    "aten._scaled_mm_v2.default": _scaled_mm_v2,
    "aten.addmm.dtype_out": _addmm,
    "aten.baddbmm.dtype_out": _addmm,
    "aten._grouped_mm.default": _grouped_mm,
    "aten._scaled_grouped_mm.default": _scaled_grouped_mm,
    "aten.mm.dtype": lambda a, b, out_dtype: a.to(out_dtype) @ b.to(out_dtype),
    "aten._scaled_dot_product_flash_attention.default": _flash,
    "aten._scaled_dot_product_flash_attention_backward.default": _flash_backward,
}
"""Functions by the name of the operator."""
