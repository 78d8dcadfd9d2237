"""Matrix products of linear layers, and weight gradients in float32."""

from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

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


def linear_into(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """Store ``linear(x, weight, bias)`` in the contiguous ``out``."""
    # ``out=`` of torch takes matrices; both views are free.
    rows = x.reshape(-1, x.shape[-1])
    flat = out.view(-1, out.shape[-1])
    if _is_onednn_faster(x, weight):
        out.copy_(linear(x, weight, bias))  # it has no argument for the output
    elif bias is None:
        torch.mm(rows, weight.t(), out=flat)
    else:
        torch.addmm(bias, rows, weight.t(), out=flat)


def input_grad(grad_y: Tensor, weight: Tensor) -> Tensor:
    """dL/dx = dL/dy W: ``grad_y`` ``[..., O]``, ``weight`` ``[O, I]`` -> ``[..., I]``; by the library of ``linear``."""
    return linear(grad_y, weight.t()) if _is_onednn_faster(grad_y, weight.t()) else grad_y.matmul(weight)


def _is_onednn_faster(x: Tensor, weight: Tensor) -> bool:
    # The cheapest test first: this runs before every product.
    if x.numel() * weight.shape[0] < MIN_MULTIPLICATIONS or not (x.dtype == weight.dtype == torch.float32 and x.is_cpu):
        return False
    # The operator has no autograd rule, and a graph must not depend on this choice.
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
