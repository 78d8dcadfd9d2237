"""Matrix products: of linear layers, grouped ones for the experts of a rank, and weight gradients in float32."""

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

ALIGNMENT = 16
"""torch's grouped product requires rows whose size is a multiple of this number of bytes."""
# Public since torch 2.10; earlier there was a private function with other requirements.
_grouped_mm = getattr(torch.nn.functional, "grouped_mm", None)


MIN_MULTIPLICATIONS = 2**23
"""Size of a product from which oneDNN is faster than MKL: each of its calls takes 13 us longer to start."""
# Not torch.ops.mkldnn._linear_pointwise.default: builds of torch without oneDNN do not have it.
_onednn_linear = getattr(torch.ops.mkldnn, "_linear_pointwise", None) if torch.backends.mkldnn.is_available() else None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """y = x W^T + b as ``torch.nn.functional.linear``, without autograd: ``x`` ``[..., I]``, ``weight`` ``[O, I]``.

    Calls oneDNN where torch calls MKL but oneDNN is faster: float32 on CPUs with AVX-512 that are not Intel's. Products
    of 512 x 256 x 1024 on one thread (AMD, 32 flops per cycle): 99 GFLOP/s with MKL, 109 with oneDNN; a training step
    takes 4.5 % less. On Intel's, MKL reaches 185 of 200 GFLOP/s and oneDNN 178; 512 x 8192 x 384: 183 and 145.
    """
    # oneDNN reads a bias with a stride as if it were contiguous (torch 2.13).
    if _is_onednn_faster(x, weight) and (bias is None or bias.is_contiguous()):
        assert _onednn_linear is not None
        return _onednn_linear(x, weight, bias, "none", [], "")
    return torch.nn.functional.linear(x, weight, bias)


def input_grad(grad_y: Tensor, weight: Tensor) -> Tensor:
    """dL/dx = dL/dy W: ``grad_y`` ``[..., O]``, ``weight`` ``[O, I]`` -> ``[..., I]``; by the library of ``linear``."""
    return linear(grad_y, weight.t()) if _is_onednn_faster(grad_y, weight.t()) else grad_y.matmul(weight)


def _is_onednn_faster(x: Tensor, weight: Tensor) -> bool:
    if x.numel() * weight.shape[0] < MIN_MULTIPLICATIONS or not (x.dtype == weight.dtype == torch.float32 and x.is_cpu):
        return False
    if _onednn_linear is None or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    return torch.backends.cpu.get_cpu_capability() == "AVX512" and not _is_intel()


@cache
def _is_intel() -> bool:
    """Whether the processor is Intel's; False on systems other than Linux."""
    try:
        return "GenuineIntel" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def runs(counts: Sequence[int]) -> Iterator[slice]:
    """Yield the slice of rows of each group: ``counts[e]`` rows of group e, in the order of groups."""
    start = 0
    for count in counts:
        yield slice(start, start + count)
        start += count


def grouped_product(x: Tensor, weight: Tensor, counts: Sequence[int]) -> Tensor:
    """y_r = x_r W_e, where row r belongs to group e: ``x`` ``[R, I]``, ``weight`` ``[E, I, O]`` -> ``[R, O]``.

    ``counts`` is the number of rows of each group: E integers >= 0 with the sum R. Calls torch's ``grouped_mm`` if
    ``is_grouped`` holds; else one product per group, with the same result.
    """
    if is_grouped(x, weight):
        assert _grouped_mm is not None
        ends = torch.tensor(list(accumulate(counts)), dtype=torch.int32, pin_memory=x.device.type == "cuda")
        return _grouped_mm(x.contiguous(), weight, offs=ends.to(x.device, non_blocking=True))
    y = x.new_empty(x.shape[0], weight.shape[2])
    for run, matrix in zip(runs(counts), weight, strict=True):
        torch.mm(x[run], matrix, out=y[run])
    return y


def is_grouped(x: Tensor, weight: Tensor) -> bool:
    """Whether torch's grouped product supports these: float32 or narrower, rows aligned to 16 bytes, at least 1 row."""
    aligned = all(extent * x.element_size() % ALIGNMENT == 0 for extent in weight.shape[1:])
    return _grouped_mm is not None and x.dtype != torch.float64 and aligned and x.shape[0] > 0


def accumulate_weight_grad_(main_grad: Tensor, grad_y: Tensor, x: Tensor) -> None:
    """main_grad_OI += grad_y_TO^T x_TI, without rounding the product to fewer bits than ``main_grad`` has.

    T tokens, O output and I input features; ``grad_y`` and ``x`` have the same dtype, ``main_grad`` the same or a wider
    one.
    """
    if main_grad.dtype == x.dtype:
        main_grad.addmm_(grad_y.t(), x)
    elif x.device.type == "cuda" and TorchVersion(torch.__version__) < "2.10":
        # Before 2.10 addmm supported a wider output only if the added matrix is as narrow as the factors.
        main_grad.add_(torch.mm(grad_y.t(), x, out_dtype=main_grad.dtype))
    elif x.device.type == "cuda":
        # The product accumulates into main_grad without a second pass over it.
        torch.addmm(main_grad, grad_y.t(), x, out_dtype=main_grad.dtype, out=main_grad)
    else:
        # In float32, because on CPUs torch rounds a product of 16-bit matrices to 16 bits. 2048 x 1024 x 4096 on one
        # thread (AVX-512 with bfloat16 instructions) takes 270 ms this way and 280 ms in parts of 512 tokens. A product
        # in bfloat16 and an addition take 80 ms, in float16 6,100 ms; both lose precision, as the test shows.
        main_grad.addmm_(grad_y.t().to(main_grad.dtype), x.to(main_grad.dtype))
