"""Weight gradients of a linear layer, accumulated in float32 over micro-batches."""

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from megatron_core.ops.backend import Backend, library_has, python_backend


def accumulate_weight_grad_(main_grad: Tensor, grad_y: Tensor, x: Tensor, *, backend: Backend = "auto") -> None:
    """main_grad_OI += grad_y_TO^T x_TI, without rounding the product to fewer bits than ``main_grad`` has.

    T tokens, O output and I input features; ``grad_y`` and ``x`` have the same dtype, ``main_grad`` the same or a wider
    one. All backends except libraries use torch's products.
    """
    if library_has("weight_grad", backend, x.device.type, x.dtype):
        library = python_backend(backend)
        if library.supports_call("weight_grad", main_grad, x):
            library.accumulate_weight_grad_(main_grad, grad_y, x)
            return
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
