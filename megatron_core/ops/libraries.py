"""NVIDIA's apex and Transformer Engine as optional backends, for comparison on GPUs; imported only if requested.

apex (https://github.com/NVIDIA/apex) must be built from source with its CUDA extensions; the package ``apex`` on PyPI
is a different project. For Transformer Engine 2.3 or newer this file calls the same functions as its own modules:
functions of the compiled module if their signatures are the same in versions 2.4, 2.8 and 2.20, else, as for rope, the
Python function above them.

The kernels of both libraries derive from Megatron-LM's. The softmax has one kernel per form, for 16-bit, packed scores:
``whole`` and ``masked`` scores ``[b, h, queries, keys]``, ``masked`` with a mask ``[b or 1, 1, queries, keys]``;
``triangle``, with as many queries as keys, ``[b h, keys, keys]``; ``aligned``, in which the last query sees the last
key; apex's ``generic``, for masked scores of any size. Forward takes the scores (and the mask) and the scale; backward
takes the gradient, the probabilities and the scale. The scaled score of a key hidden by a mask or by ``aligned`` is
-10,000: a row is correct if the scaled scores of its visible keys are well above that.

The functions on lists of tensors take the chunk size, an int32 flag that is set if a number is not finite, and the
lists: ``multi_tensor_l2norm(chunk, flag, [xs], per_tensor) -> (norm, norms)``; ``multi_tensor_scale(chunk, flag, [xs,
ys], factor)``, which writes y = factor * x in the dtype of the ys; ``multi_tensor_adam(chunk, flag, [grads, weights,
exp_avgs, exp_avg_sqs], lr, beta1, beta2, epsilon, step, mode, bias_correction, weight_decay)``.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

HALVES = (torch.bfloat16, torch.float16)
CHUNK = 2048 * 32
"""Chunk size of the functions on lists, as in both libraries' own callers."""
MOST_ELEMENTS = 2**31 - 1
"""Maximal number of elements for 32-bit offsets."""
MOST_KEYS, MOST_KEYS_OF_GENERIC = 16384, 8192
"""Maximal number of keys of the softmax; the limit of ``generic`` is the largest size in apex's own tests."""
DECOUPLED, CORRECTED = 1, 1
"""Values of ``mode`` and ``bias_correction`` of ``multi_tensor_adam`` for AdamW."""
ENGINE = "transformer_engine_torch"


@cache
def is_absent(module: str) -> bool:
    """Whether ``module`` is not installed."""
    return find_spec(module) is None


class Library:
    """Common part of both libraries: supported operations, data types and calls, and the calls themselves."""

    title: ClassVar[str]
    install: ClassVar[str]
    """Installation instructions."""
    modules: ClassVar[Mapping[str, tuple[str, ...]]]
    """The required modules of each supported operation."""
    dtypes: ClassVar[Mapping[str, tuple[torch.dtype, ...]]]
    """The supported data types of an operation, if they are not float32, bfloat16 and float16."""
    PARTIAL_OPS: ClassVar[frozenset[str]]
    """The operations that are supported only for some calls."""
    softmaxes: ClassVar[Mapping[str | None, tuple[str, str, str]]]
    """Module, forward function and backward function of each form."""
    lists: ClassVar[str]
    """The module of the functions on lists of tensors."""
    most_tensors: ClassVar[int] = MOST_ELEMENTS
    adam_casts: ClassVar[bool]
    """Whether ``multi_tensor_adam`` supports 16-bit gradients, and with the lists [grads, copies, exp_avgs,
    exp_avg_sqs, weights] also writes the copies."""

    @property
    def OPS(self) -> tuple[str, ...]:
        """The supported operations."""
        return tuple(self.modules)

    def supports_dtype(self, op: str, dtype: torch.dtype) -> bool:
        """Whether it has ``op`` for ``dtype``; float64 passes here and is refused by ``unavailable_reason``."""
        dtypes = self.dtypes.get(op, (torch.float32, *HALVES))
        return op in self.modules and (dtype == torch.float64 or dtype in dtypes)

    def unavailable_reason(self, op: str, device_type: str, dtype: torch.dtype) -> str | None:
        """Why a supported operation cannot run on this device and data type; None if it can."""
        absent = next(filter(is_absent, self.modules[op]), None)
        if absent is not None:
            return f"{absent} is not installed; {self.install}"
        if device_type != "cuda":
            return f"{self.title} runs on cuda, not on {device_type}"
        return None if dtype != torch.float64 else f"{self.title} does not support {dtype}"

    def supports_call(self, op: str, *arguments: Any) -> bool:
        """Whether a call of ``op`` is supported; ``arguments`` are the relevant arguments of the call."""
        return op not in self.PARTIAL_OPS or getattr(self, f"_takes_{op}")(*arguments)

    def _takes_softmax(self, scores: Tensor, mask: Tensor | None, causal: bool, window: int | None) -> bool:
        return softmax_form(scores, mask, causal, window) in self.softmaxes

    def _takes_rope(self, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> bool:
        """Requires equal positions of all sequences, 32-bit offsets into the memory of ``x``, and tables without
        gradient."""
        positions = cos.dim() - 1
        if positions not in (1, 2) or not 0 < x.dim() - positions <= 3 or cos.shape[0] != x.shape[0]:
            return False
        if cos.requires_grad or sin.requires_grad or cos.shape[1:-1] not in ((), (1,)):
            return False
        reach = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
        return 0 < x.numel() <= MOST_ELEMENTS and reach < MOST_ELEMENTS

    def _takes_multi_tensor(self, tensors: Sequence[Tensor]) -> bool:
        sizes = [tensor.numel() for tensor in tensors]
        return any(sizes) and max(sizes) <= 2**31 - CHUNK and len(sizes) <= self.most_tensors

    def attention_softmax(
        self, scores: Tensor, mask: Tensor | None, scale: float, causal: bool, window: int | None
    ) -> Tensor:
        """exp(scale * scores) / sum of the same over the visible keys; 0 for masked keys."""
        form = softmax_form(scores, mask, causal, window)
        module, forward, backward = self.softmaxes[form]
        functions = getattr(import_module(module), forward), getattr(import_module(module), backward)
        if torch.tensor(scale, dtype=scores.dtype, device="cpu").item() != scale:
            # The libraries' forward rounds the scale to the dtype of the scores, by up to 0.4 % in bfloat16. Scaling
            # the scores first rounds each score separately, as in PyTorch.
            scores, scale = scores * scale, 1.0
        batch, heads, queries, keys = four(scores.shape)
        given = scores.reshape((batch * heads, queries, keys) if form == "triangle" else (batch, heads, queries, keys))
        hidden = None if mask is None else packed(mask.reshape(four(mask.shape)).expand(-1, 1, queries, keys))

        def run(x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
            probs = functions[0](packed(x), *(() if hidden is None else (hidden,)), float(scale))
            if hidden is not None and self.lists != ENGINE:
                # Before apex's #1390 (2022) a row without visible keys had equal weights for all keys.
                probs.masked_fill_(hidden, 0.0)
            return probs, (probs,)

        def run_backward(dprobs: Tensor, probs: Tensor) -> tuple[Tensor]:
            # A copy, because backward overwrites the gradient, and autograd may pass the same tensor to other nodes.
            return (functions[1](dprobs.clone(memory_format=torch.contiguous_format), probs, float(scale)),)

        return _Call.apply(run, run_backward, given).view(scores.shape)

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
        """AdamW (Loshchilov and Hutter 2019, algorithm 2); a factor other than 1, and gradients in a dtype that
        ``multi_tensor_adam`` does not support, need a pass before it."""
        module, narrow = import_module(self.lists), grads[0].dtype != weights[0].dtype
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
    """apex; its rope needs a build with the functions ``forward_cached`` and ``backward_cached``."""

    title, install = "apex", "build apex with its CUDA extensions from https://github.com/NVIDIA/apex"
    softmaxes: ClassVar[Mapping[str | None, tuple[str, str, str]]] = {
        "triangle": ("scaled_upper_triang_masked_softmax_cuda", "forward", "backward"),
        "masked": ("scaled_masked_softmax_cuda", "forward", "backward"),
        "generic": ("generic_scaled_masked_softmax_cuda", "forward", "backward"),
        "whole": ("scaled_softmax_cuda", "forward", "backward"),
    }
    modules: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "layer_norm": ("apex", "fused_layer_norm_cuda"),
        "multi_tensor": ("apex", "amp_C"),
        "rms_norm": ("apex", "fused_layer_norm_cuda"),
        "rope": ("apex", "fused_rotary_positional_embedding"),
        "softmax": ("apex", *(module for module, _, _ in softmaxes.values())),
        "weight_grad": ("apex", "fused_weight_gradient_mlp_cuda"),
    }
    # In 16 bits apex's rope rounds cosines and sines to 16 bits, which changes the angles. In float32 its products of
    # weight gradients may have lower precision, depending on the settings of cuBLAS.
    dtypes: ClassVar[Mapping[str, tuple[torch.dtype, ...]]] = {
        "rope": (torch.float32,),
        "softmax": HALVES,
        "weight_grad": HALVES,
    }
    PARTIAL_OPS = frozenset({"multi_tensor", "rope", "softmax", "weight_grad"})
    lists, adam_casts = "amp_C", False

    def _takes_rope(self, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> bool:
        return not interleaved and super()._takes_rope(x, cos, sin, interleaved)

    def _takes_weight_grad(self, main_grad: Tensor, x: Tensor) -> bool:
        return main_grad.is_contiguous() and main_grad.dtype in (torch.float32, x.dtype) and len(x) > 0

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """y = x / sqrt(mean(x^2) + epsilon) * weight over the last dim."""
        norms = import_module("apex.normalization.fused_layer_norm")
        return norms.fused_rms_norm_affine(x, weight, list(weight.shape), epsilon)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
        """y = (x - mean) / sqrt(variance + epsilon) * weight + bias over the last dim."""
        norms = import_module("apex.normalization.fused_layer_norm")
        return norms.fused_layer_norm_affine(x, weight, bias, list(weight.shape), epsilon)

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        """Rotate pairs of channels (i, i + r/2) by ``forward_cached(x, cos, sin, transposed)`` and
        ``backward_cached(dy, cos, sin, transposed)`` on ``[s, b, h, d]`` with any strides and float32 tables ``[s, 1,
        1, r]``."""
        module = import_module("fused_rotary_positional_embedding")
        tables = [for_each_channel(table, interleaved=False) for table in (cos, sin)]
        return _Call.apply(
            lambda x: (module.forward_cached(x, *tables, False), ()),
            lambda dy: (module.backward_cached(dy, *tables, False),),
            four_dims(x, cos),
        ).view(x.shape)

    def accumulate_weight_grad_(self, main_grad: Tensor, grad_y: Tensor, x: Tensor) -> None:
        """main_grad_OI += grad_y_TO^T x_TI, accumulated in float32; matrices must be contiguous."""
        bits = 32 if main_grad.dtype == torch.float32 else 16
        product = getattr(import_module("fused_weight_gradient_mlp_cuda"), f"wgrad_gemm_accum_fp{bits}")
        product(x.contiguous(), grad_y.contiguous(), main_grad)


class TransformerEngine(Library):
    """Transformer Engine, 2.3 or newer."""

    title, install = "Transformer Engine", 'pip install "transformer-engine[pytorch]>=2.3"'
    modules: ClassVar[Mapping[str, tuple[str, ...]]] = dict.fromkeys(
        ("activation", "layer_norm", "multi_tensor", "rms_norm", "rope", "softmax"), (ENGINE,)
    )
    dtypes: ClassVar[Mapping[str, tuple[torch.dtype, ...]]] = {"softmax": HALVES}
    PARTIAL_OPS = frozenset({"activation", "multi_tensor", "rope", "softmax"})
    softmaxes: ClassVar[Mapping[str | None, tuple[str, str, str]]] = {
        form: (ENGINE, f"{name}_forward", f"{name}_backward")
        for form, name in {
            "whole": "scaled_softmax",
            "masked": "scaled_masked_softmax",
            "triangle": "scaled_upper_triang_masked_softmax",
            "aligned": "scaled_aligned_causal_masked_softmax",
        }.items()
    }
    lists, adam_casts, most_tensors = ENGINE, True, 1024  # most_tensors as in its own optimizer
    activations: ClassVar[Mapping[str, str]] = {
        "gelu_tanh": "gelu",
        "geglu_tanh": "geglu",
        "squared_relu": "srelu",
        "swiglu": "swiglu",
    }
    """Transformer Engine's names of our activations: its gelu is the tanh form; the gate is the first half."""

    def _takes_activation(self, x: Tensor, kind: str) -> bool:
        return kind in self.activations and x.numel() > 0

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

    def bias_activation(self, x: Tensor, bias: Tensor | None, kind: str) -> Tensor:
        """y = f(x + bias), the sum in the precision of ``x``, by functions such as ``gelu(x, quantizer)`` and
        ``dgelu(dy, x, quantizer)`` on rows ``[rows, n]``."""
        engine, name = import_module(ENGINE), self.activations[kind]

        def run(rows: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
            rows = rows.contiguous()
            return getattr(engine, name)(rows, None), (rows,)

        def run_backward(dy: Tensor, rows: Tensor) -> tuple[Tensor]:
            return (getattr(engine, f"d{name}")(dy.contiguous(), rows, None),)

        total = x if bias is None else x + bias
        return _Call.apply(run, run_backward, total.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        """Rotate pairs of channels by ``apply_rotary_pos_emb(x, angles, tensor_format, interleaved=, fused=)`` on ``[s,
        b, h, d]`` with any strides; the float32 angles ``[s, 1, 1, r]`` are computed from the tables, with one or two
        roundings. RuntimeError (on a GPU a device-side assertion) if table entries are not a cosine and a sine."""
        torch._assert_async(
            (cos.square() + sin.square() - 1).abs().max() < 1e-5,
            "kernel_backend='transformer_engine': the tables of rope are not cosines and sines of angles; or use "
            "kernel_backend='auto'",
        )
        turn = import_module("transformer_engine.pytorch.attention.rope").apply_rotary_pos_emb
        angles = for_each_channel(torch.atan2(sin, cos), interleaved)
        given = four_dims(x, cos)
        return turn(given, angles, tensor_format="sbhd", interleaved=interleaved, fused=True).view(x.shape)


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


def softmax_form(scores: Tensor, mask: Tensor | None, causal: bool, window: int | None) -> str | None:
    """The form of a call of ``ops.attention_softmax``; None if no kernel supports it: a window, a causal mask together
    with a mask, a mask that differs between heads, or unsupported sizes.

    All kernels but ``generic`` use blocks of four warps. With up to 128 keys a block computes eight rows, else four:
    for ``whole`` and ``masked`` these are rows of one head, for ``triangle`` one row of each of several heads.
    """
    if not 2 <= scores.dim() <= 4 or window is not None or (causal and mask is not None) or scores.numel() == 0:
        return None
    *heads, queries, keys = scores.shape
    if mask is not None:
        shape = four(mask.shape)
        if len(shape) != 4 or shape[1] != 1 or shape[0] not in (1, four(scores.shape)[0]):
            return None
        form, divided = "masked", queries
    elif not causal:
        form, divided = "whole", queries
    else:
        form, divided = ("triangle", prod(heads)) if queries == keys else ("aligned", 0)
    fits = 16 < keys <= MOST_KEYS and keys % 8 == 0 and divided % (8 if keys <= 128 else 4) == 0
    if scores.numel() <= MOST_ELEMENTS and fits:
        return form
    generic = form == "masked" and keys <= MOST_KEYS_OF_GENERIC and scores.numel() <= MOST_ELEMENTS
    return "generic" if generic else None


def four(sizes: Sequence[int]) -> tuple[int, ...]:
    """``sizes`` with leading ones, so that there are at least four."""
    return (1,) * (4 - len(sizes)) + tuple(sizes)


def packed(x: Tensor) -> Tensor:
    """``x`` as a contiguous tensor, aligned to reads of four elements."""
    x = x.contiguous()
    return x if x.data_ptr() % (4 * x.element_size()) == 0 else x.clone()


def four_dims(x: Tensor, cos: Tensor) -> Tensor:
    """``x`` ``[s, b, ..., d]``, or without b if ``cos`` has no dim for it, as ``[s, b, h, d]``; a view if strides
    allow."""
    x = x if cos.dim() == 3 else x.unsqueeze(1)
    return x.reshape(*x.shape[:2], -1, x.shape[-1])


def for_each_channel(table: Tensor, interleaved: bool) -> Tensor:
    """A table ``[s, 1, r/2]`` or ``[s, r/2]`` as ``[s, 1, 1, r]``, with a pair's entry for both of its channels."""
    table = table.reshape(len(table), 1, 1, -1)
    return table.repeat_interleave(2, -1) if interleaved else torch.cat([table, table], -1)


def apply(function: Callable, *lists: Sequence[Tensor], numbers: tuple = ()) -> Any:
    """Call ``function`` on corresponding lists, without their empty tensors: if the last tensor is empty, the library's
    functions skip the tensors before it. The flag is a new tensor, which is not read."""
    kept = [of_one for of_one in zip(*lists, strict=True) if of_one[0].numel()]
    flag = torch.zeros(1, dtype=torch.int32, device=kept[0][0].device)
    return function(CHUNK, flag, [list(of_one) for of_one in zip(*kept, strict=True)], *numbers)


LIBRARIES: dict[str, Library] = {"apex": Apex(), "transformer_engine": TransformerEngine()}
"""Libraries by their names in ``kernel_backend``."""
