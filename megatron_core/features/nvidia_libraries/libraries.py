"""NVIDIA's apex and Transformer Engine as optional backends on GPUs; imported only if requested.

apex (https://github.com/NVIDIA/apex) must be built from source with its CUDA extensions; the package ``apex`` on PyPI
is a different project. Transformer Engine must be 2.3 or newer.
"""

# Of Transformer Engine this file calls functions of the compiled module, whose signatures are the same in versions 2.4,
# 2.8 and 2.20; the Python layers above them change with each release.
# The functions on lists of tensors take the chunk size, an int32 flag that is set if a number is not finite, and the
# lists: ``multi_tensor_l2norm(chunk, flag, [xs], per_tensor) -> (norm, norms)``; ``multi_tensor_scale(chunk, flag, [xs,
# ys], factor)``, which writes y = factor * x in the dtype of the ys; ``multi_tensor_adam(chunk, flag, [grads, weights,
# exp_avgs, exp_avg_sqs], lr, beta1, beta2, epsilon, step, mode, bias_correction, weight_decay)``.

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CHUNK = 2048 * 32
"""Chunk size of the functions on lists, as in both libraries' own callers."""
DECOUPLED = 1
CORRECTED = 1
"""Values of ``mode`` and ``bias_correction`` of ``multi_tensor_adam`` for AdamW."""
ENGINE = "transformer_engine_torch"


@cache
def is_absent(module: str) -> bool:
    """Whether ``module`` is not installed."""
    return find_spec(module) is None


class Library:
    """Base class of the adapters of both libraries."""

    title: ClassVar[str]
    install: ClassVar[str]
    """Installation instructions."""
    modules: ClassVar[Mapping[str, tuple[str, ...]]]
    """The required modules of each supported operation."""
    PARTIAL_OPS: ClassVar[frozenset[str]]
    """The operations that are supported only for some calls."""
    lists: ClassVar[str]
    """Name of the module with the functions on lists of tensors."""
    max_tensors: ClassVar[int] = 2**31 - 1
    """Maximal number of tensors in a list."""
    adam_casts: ClassVar[bool]
    """Whether ``multi_tensor_adam`` supports 16-bit gradients, and with the lists [grads, copies, exp_avgs,
    exp_avg_sqs, weights] also writes the copies."""

    @property
    def OPS(self) -> tuple[str, ...]:
        """The supported operations."""
        return tuple(self.modules)

    def unavailable_reason(self, op: str, device_type: str, dtype: torch.dtype) -> str | None:
        """Why an operation of the library cannot run on this device in this data type; None if it can."""
        absent = next(filter(is_absent, self.modules[op]), None)
        if absent is not None:
            return f"{absent} is not installed; {self.install}"
        if device_type != "cuda":
            return f"{self.title} runs on cuda, not on {device_type}"
        return None if dtype in DTYPES else f"{self.title} does not support {dtype}"

    def supports_call(self, op: str, *arguments: Any) -> bool:
        """Whether the library supports ``op`` with these arguments: x and kind of ``activation``, the tensors of
        ``multi_tensor``, none of the norms."""
        return op not in self.PARTIAL_OPS or getattr(self, f"_supports_{op}")(*arguments)

    def _supports_multi_tensor(self, tensors: Sequence[Tensor]) -> bool:
        sizes = [tensor.numel() for tensor in tensors]
        return any(sizes) and max(sizes) <= 2**31 - CHUNK and len(sizes) <= self.max_tensors

    def squared_norm(self, tensors: Sequence[Tensor]) -> Tensor:
        """Sum of x^2 over all elements of all tensors: the float64 square of a norm accumulated in float32."""
        norm, _ = apply(import_module(self.lists).multi_tensor_l2norm, tensors, numbers=(False,))
        return norm.double().square().reshape(())

    def scale_(self, tensors: Sequence[Tensor], factor: float) -> None:
        """x = factor * x in place."""
        apply(import_module(self.lists).multi_tensor_scale, tensors, tensors, numbers=(factor,))

    def adamw_(
        self,
        grads: Sequence[Tensor],
        weights: Sequence[Tensor],
        exp_avgs: Sequence[Tensor],
        exp_avg_sqs: Sequence[Tensor],
        copies: Sequence[Tensor],
        *,
        step: int,
        factor: float,
        **rates: float,
    ) -> None:
        """AdamW (Loshchilov and Hutter 2019, algorithm 2). A factor other than 1 needs a separate pass; so do 16-bit
        gradients and copies unless ``adam_casts``."""
        module = import_module(self.lists)
        narrow = grads[0].dtype != weights[0].dtype
        if factor != 1.0 or (narrow and not self.adam_casts):
            scaled = [torch.empty_like(weight) for weight in weights] if narrow else grads
            apply(module.multi_tensor_scale, grads, scaled, numbers=(factor,))
            grads = scaled
        casts = bool(copies) and self.adam_casts
        lists = (grads, copies, exp_avgs, exp_avg_sqs, weights) if casts else (grads, weights, exp_avgs, exp_avg_sqs)
        lr, beta1, beta2, eps, decay = (rates[name] for name in ("lr", "beta1", "beta2", "eps", "weight_decay"))
        apply(module.multi_tensor_adam, *lists, numbers=(lr, beta1, beta2, eps, step, DECOUPLED, CORRECTED, decay))
        if copies and not casts:
            apply(module.multi_tensor_scale, weights, copies, numbers=(1.0,))


class Apex(Library):
    """apex, built with its CUDA extensions."""

    title = "apex"
    install = "build apex with its CUDA extensions from https://github.com/NVIDIA/apex"
    modules: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "layer_norm": ("apex", "fused_layer_norm_cuda"),
        "multi_tensor": ("apex", "amp_C"),
        "rms_norm": ("apex", "fused_layer_norm_cuda"),
    }
    PARTIAL_OPS = frozenset({"multi_tensor"})
    lists = "amp_C"
    adam_casts = False

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """y = x / sqrt(mean(x^2) + epsilon) * weight over the last dim."""
        norms = import_module("apex.normalization.fused_layer_norm")
        return norms.fused_rms_norm_affine(x, weight, list(weight.shape), epsilon)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
        """y = (x - mean) / sqrt(variance + epsilon) * weight + bias over the last dim."""
        norms = import_module("apex.normalization.fused_layer_norm")
        return norms.fused_layer_norm_affine(x, weight, bias, list(weight.shape), epsilon)


class TransformerEngine(Library):
    """Transformer Engine, 2.3 or newer."""

    title = "Transformer Engine"
    install = 'pip install "transformer-engine[pytorch]>=2.3"'
    modules: ClassVar[Mapping[str, tuple[str, ...]]] = dict.fromkeys(
        ("activation", "layer_norm", "multi_tensor", "rms_norm"), (ENGINE,)
    )
    PARTIAL_OPS = frozenset({"activation", "multi_tensor"})
    # max_tensors as in its own optimizer
    lists = ENGINE
    adam_casts = True
    max_tensors = 1024
    activations: ClassVar[Mapping[str, str]] = {
        "gelu_tanh": "gelu",
        "geglu_tanh": "geglu",
        "squared_relu": "srelu",
        "swiglu": "swiglu",
    }
    """Names of the activations in Transformer Engine, whose gelu is the tanh form. The gate is the first half."""

    def _supports_activation(self, x: Tensor, activation: str) -> bool:
        return activation in self.activations and x.numel() > 0

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """y = x / sqrt(mean(x^2) + epsilon) * weight over the last dim, by ``rmsnorm_fwd(x, weight, epsilon, out,
        quantizer, dtype, sm_margin, zero_centered_gamma)`` and ``rmsnorm_bwd`` on rows ``[rows, n]``."""
        return self._norm("rmsnorm", x, weight, epsilon=epsilon)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
        """y = (x - mean) / sqrt(variance + epsilon) * weight + bias over the last dim, by ``layernorm_fwd`` and
        ``layernorm_bwd``."""
        return self._norm("layernorm", x, weight, bias, epsilon=epsilon)

    def _norm(self, name: str, x: Tensor, *parameters: Tensor, epsilon: float) -> Tensor:
        engine = import_module(ENGINE)
        dtype = import_module("transformer_engine.pytorch.constants").TE_DType[x.dtype]

        def run(rows: Tensor, *parameters: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
            rows = rows.contiguous()
            y, *statistics = getattr(engine, f"{name}_fwd")(rows, *parameters, epsilon, None, None, dtype, 0, False)
            return y, (rows, *(s for s in statistics if s is not None), parameters[0])

        def run_backward(dy: Tensor, *saved: Tensor) -> tuple[Tensor, ...]:
            return tuple(getattr(engine, f"{name}_bwd")(dy.contiguous(), *saved, 0, False))

        return _Call.apply(run, run_backward, x.reshape(-1, x.shape[-1]), *parameters).view(x.shape)

    def bias_activation(self, x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
        """y = f(x + bias), the sum in the precision of ``x``, by functions such as ``gelu(x, quantizer)`` and
        ``dgelu(dy, x, quantizer)`` on rows ``[rows, n]``."""
        engine = import_module(ENGINE)
        name = self.activations[activation]

        def run(rows: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
            rows = rows.contiguous()
            return getattr(engine, name)(rows, None), (rows,)

        def run_backward(dy: Tensor, rows: Tensor) -> tuple[Tensor]:
            return (getattr(engine, f"d{name}")(dy.contiguous(), rows, None),)

        total = x if bias is None else x + bias
        return _Call.apply(run, run_backward, total.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)


class _Call(torch.autograd.Function):
    """Autograd function of a library's ``forward(*tensors) -> (y, saved)``, ``backward(dy, *saved) -> gradients``."""

    @staticmethod
    def forward(ctx: Any, forward: Callable, backward: Callable, *tensors: Tensor) -> Tensor:
        y, saved = forward(*tensors)
        ctx.save_for_backward(*saved)
        ctx.run_backward = backward
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.run_backward(dy, *ctx.saved_tensors)


def apply(function: Callable, *lists: Sequence[Tensor], numbers: tuple = ()) -> Any:
    """Call ``function`` on corresponding lists without their empty tensors: if the last tensor is empty, the library's
    functions skip the tensors before it. The flag for numbers that are not finite is ignored."""
    nonempty = [tensors for tensors in zip(*lists, strict=True) if tensors[0].numel()]
    flag = torch.zeros(1, dtype=torch.int32, device=nonempty[0][0].device)
    return function(CHUNK, flag, [list(tensors) for tensors in zip(*nonempty, strict=True)], *numbers)


LIBRARIES: dict[str, Library] = {"apex": Apex(), "transformer_engine": TransformerEngine()}
"""Libraries by their names in ``kernel_backend``."""
