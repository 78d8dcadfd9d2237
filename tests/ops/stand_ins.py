"""apex and Transformer Engine as far as the adapters call them: their signatures, limits and conventions, on the CPU.

Each function asserts what the published one takes for granted, and does what it does: hides keys by -10,000, writes the
gradient over what it was given, rounds tables to the type of what they turn.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megatron_core.ops import reference
from megatron_core.ops.libraries import apex, transformer_engine

HALVES = (torch.bfloat16, torch.float16)


class StandIns:
    """Modules that can be found and imported, and which of their functions were called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        self.called: list[str] = []

    def module(self, name: str, **content: object) -> None:
        """A module ``name`` with such content."""
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        for key, value in content.items():
            setattr(module, key, self._noted(f"{name}.{key}", value) if callable(value) else value)
        self.monkeypatch.setitem(sys.modules, name, module)

    def _noted(self, name: str, function: Callable) -> Callable:
        def noted(*args: object, **kwargs: object) -> object:
            self.called.append(name)
            return function(*args, **kwargs)

        return noted


def install_apex(stand_ins: StandIns) -> None:
    """apex with all the extensions that the adapter calls."""

    def fused_rms_norm_affine(input, weight, normalized_shape, eps=1e-6, memory_efficient=False):
        assert normalized_shape == [weight.numel()]
        return reference.rms_norm(input, weight, eps)

    def fused_layer_norm_affine(input, weight, bias, normalized_shape, eps=1e-6, memory_efficient=False):
        assert normalized_shape == [weight.numel()]
        return reference.layer_norm(input, weight, bias, eps)

    stand_ins.module("fused_layer_norm_cuda")
    stand_ins.module("apex")
    stand_ins.module("apex.normalization")
    functions = {f.__name__: f for f in (fused_rms_norm_affine, fused_layer_norm_affine)}
    stand_ins.module("apex.normalization.fused_layer_norm", **functions)
    stand_ins.module("scaled_upper_triang_masked_softmax_cuda", forward=triangle_forward, backward=triangle_backward)
    stand_ins.module("scaled_masked_softmax_cuda", forward=masked_forward, backward=softmax_backward)
    stand_ins.module("scaled_softmax_cuda", forward=whole_forward, backward=softmax_backward)
    stand_ins.module("generic_scaled_masked_softmax_cuda", forward=hidden_by_10000, backward=softmax_backward)
    stand_ins.module(
        "fused_rotary_positional_embedding", forward_cached=rope_forward_cached, backward_cached=rope_backward_cached
    )
    stand_ins.module(
        "amp_C",
        multi_tensor_l2norm=multi_tensor_l2norm,
        multi_tensor_scale=multi_tensor_scale,
        multi_tensor_adam=adam_of_one_type,
    )
    stand_ins.module(
        "fused_weight_gradient_mlp_cuda", wgrad_gemm_accum_fp32=wgrad(torch.float32), wgrad_gemm_accum_fp16=wgrad(None)
    )


def install_transformer_engine(stand_ins: StandIns) -> None:
    """transformer_engine_torch, its functions without autograd, and what the adapter calls of the package above it."""
    softmaxes = {
        "scaled_softmax": (whole_forward, softmax_backward),
        "scaled_masked_softmax": (masked_zero_forward, softmax_backward),
        "scaled_upper_triang_masked_softmax": (triangle_forward, triangle_backward),
        "scaled_aligned_causal_masked_softmax": (aligned_forward, softmax_backward),
    }
    content: dict[str, Callable] = {
        f"{name}_{way}": function
        for name, both in softmaxes.items()
        for way, function in zip(("forward", "backward"), both, strict=True)
    }
    for name, function in ACTIVATIONS.items():
        content |= {name: activation_forward(function), f"d{name}": activation_backward(function)}
    stand_ins.module(
        "transformer_engine_torch",
        rmsnorm_fwd=lambda x, weight, eps, *rest: norm_forward(x, weight, None, eps, *rest),
        layernorm_fwd=norm_forward,
        rmsnorm_bwd=rmsnorm_bwd,
        layernorm_bwd=layernorm_bwd,
        multi_tensor_l2norm=multi_tensor_l2norm,
        multi_tensor_scale=multi_tensor_scale,
        multi_tensor_adam=adam_of_any_types,
        **content,
    )
    dtypes = {dtype: f"type of {dtype}" for dtype in (torch.float32, *HALVES)}
    for package in ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.attention"):
        stand_ins.module(package)
    stand_ins.module("transformer_engine.pytorch.constants", TE_DType=dtypes)
    stand_ins.module("transformer_engine.pytorch.attention.rope", apply_rotary_pos_emb=apply_rotary_pos_emb)


INSTALL = {"apex": install_apex, "transformer_engine": install_transformer_engine}


def forget() -> None:
    """Look again for what is installed."""
    apex._is_absent.cache_clear()
    transformer_engine._is_absent.cache_clear()


def plain_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    return reference.rms_norm(x, weight, eps) if bias is None else reference.layer_norm(x, weight, bias, eps)


def norm_forward(x, weight, bias, eps, ln_out, quantizer, otype, sm_margin, zero_centered_gamma):
    assert x.dim() == 2 and x.is_contiguous() and ln_out is None and quantizer is None
    assert otype == f"type of {x.dtype}" and (sm_margin, zero_centered_gamma) == (0, False)
    mean = None if bias is None else x.mean(-1)
    return plain_norm(x, weight, bias, eps), mean, torch.full((len(x),), eps)


def norm_backward(dz, x, rsigma, gamma, bias):
    assert dz.shape == x.shape and dz.is_contiguous()
    leaves = [t.detach().requires_grad_() for t in ((x, gamma) if bias is None else (x, gamma, bias))]
    with torch.enable_grad():
        y = plain_norm(*leaves, *([None] if bias is None else []), rsigma[0].item())
        return torch.autograd.grad(y, leaves, dz)


def rmsnorm_bwd(dz, x, rsigma, gamma, sm_margin, zero_centered_gamma):
    return norm_backward(dz, x, rsigma, gamma, None)


def layernorm_bwd(dz, x, mu, rsigma, gamma, sm_margin, zero_centered_gamma):
    assert torch.equal(mu, x.mean(-1))
    return norm_backward(dz, x, rsigma, gamma, torch.zeros_like(gamma))


def check_scores(input: Tensor, dims: int, divided: int) -> None:
    """Packed and of 16 bits, with a number of rows that blocks of 128 threads divide evenly."""
    keys = input.shape[-1]
    assert input.dim() == dims and input.is_contiguous() and input.dtype in HALVES and input.data_ptr() % 8 == 0
    assert 16 < keys <= 16384 and keys % 8 == 0 and divided % (8 if keys <= 128 else 4) == 0


def scaled(input: Tensor, scale_factor: float) -> Tensor:
    """In float32, by a scale that the scores' type holds: the forward kernels' dispatch rounds others to it."""
    assert isinstance(scale_factor, float) and torch.tensor(scale_factor, dtype=input.dtype).item() == scale_factor
    return input.float() * scale_factor


def whole_forward(input, scale_factor):
    check_scores(input, 4, input.shape[2])
    return scaled(input, scale_factor).softmax(-1).to(input.dtype)


def hidden_by_10000(input, mask, scale_factor):
    batch, _, queries, keys = input.shape
    assert mask.dtype == torch.bool and mask.is_contiguous() and mask.shape[1:] == (1, queries, keys)
    assert mask.shape[0] in (1, batch) and mask.data_ptr() % 4 == 0 and input.is_contiguous() and input.dtype in HALVES
    return scaled(input, scale_factor).masked_fill(mask, -10000.0).softmax(-1).to(input.dtype)


def masked_forward(input, mask, scale_factor):
    """apex's until 2022: rows that see nothing see all alike."""
    check_scores(input, 4, input.shape[2])
    return hidden_by_10000(input, mask, scale_factor)


def masked_zero_forward(input, mask, scale_factor):
    return masked_forward(input, mask, scale_factor).masked_fill(mask.all(-1, keepdim=True), 0.0)


def triangle_forward(input, scale_factor):
    check_scores(input, 3, len(input))
    queries, keys = input.shape[1:]
    assert queries == keys
    above = torch.ones(keys, keys, dtype=torch.bool).triu(1)
    return scaled(input, scale_factor).masked_fill(above, -torch.inf).softmax(-1).to(input.dtype)


def aligned_forward(input, scale_factor):
    check_scores(input, 4, 0)
    queries, keys = input.shape[-2:]
    above = torch.ones(queries, keys, dtype=torch.bool).triu(keys - queries + 1)
    probs = scaled(input, scale_factor).masked_fill(above, -10000.0).softmax(-1)
    return probs.masked_fill(above, 0.0).to(input.dtype)


def softmax_backward(output_grads, softmax_results, scale_factor):
    assert output_grads.is_contiguous() and softmax_results.is_contiguous()
    assert output_grads.dtype == softmax_results.dtype and output_grads.shape == softmax_results.shape
    weighted = output_grads.float() * softmax_results.float()
    grads = scale_factor * (weighted - softmax_results.float() * weighted.sum(-1, keepdim=True))
    return output_grads.copy_(grads)


def triangle_backward(output_grads, softmax_results, scale_factor):
    assert output_grads.dim() == 3
    return softmax_backward(output_grads, softmax_results, scale_factor)


def turned(t: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Channels by tables ``[s, 1, 1, r]``, each with the half or the neighbour that it turns with."""
    own, rest = t[..., : cos.shape[-1]], t[..., cos.shape[-1] :]
    if interleaved:
        other = torch.stack([-own[..., 1::2], own[..., ::2]], -1).flatten(-2)
    else:
        a, b = own.chunk(2, -1)
        other = torch.cat([-b, a], -1)
    return torch.cat([(own * cos + other * sin).to(t.dtype), rest], -1)


def rope_forward_cached(input, cos, sin, transpose_output):
    assert input.dim() == cos.dim() == sin.dim() == 4 and not transpose_output
    assert cos.shape == sin.shape == (len(input), 1, 1, cos.shape[-1]) and cos.shape[-1] <= input.shape[-1]
    assert cos.is_contiguous() and sin.is_contiguous() and cos.dtype == sin.dtype
    return turned(input, cos.to(input.dtype), sin.to(input.dtype), False).contiguous()


def rope_backward_cached(output_grads, cos, sin, transpose_output):
    return rope_forward_cached(output_grads, cos, -sin, transpose_output)


def apply_rotary_pos_emb(
    t,
    freqs,
    tensor_format="sbhd",
    start_positions=None,
    interleaved=False,
    fused=False,
    cu_seqlens=None,
    cp_size=1,
    cp_rank=0,
):
    assert fused and tensor_format == "sbhd" and t.dim() == 4 and freqs.dtype == torch.float32
    assert freqs.shape == (len(t), 1, 1, freqs.shape[-1]) and freqs.is_contiguous()
    return turned(t, freqs.cos(), freqs.sin(), interleaved)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": lambda x: functional.gelu(x, approximate="tanh"),
    "srelu": lambda x: x.relu() ** 2,
    "geglu": lambda x: functional.gelu(x.chunk(2, -1)[0], approximate="tanh") * x.chunk(2, -1)[1],
    "swiglu": lambda x: functional.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
}


def activation_forward(function: Callable[[Tensor], Tensor]) -> Callable:
    def forward(input, quantizer):
        assert input.dim() == 2 and input.is_contiguous() and input.numel() and quantizer is None
        return function(input)

    return forward


def activation_backward(function: Callable[[Tensor], Tensor]) -> Callable:
    def backward(grad, fwd_input, quantizer):
        assert grad.dim() == fwd_input.dim() == 2 and grad.is_contiguous() and quantizer is None
        return torch.func.vjp(function, fwd_input)[1](grad)[0]

    return backward


def check_lists(chunk_size: int, noop_flag: Tensor, tensor_lists: list[list[Tensor]]) -> None:
    """Lists of the same contiguous sizes; were the last tensor empty, nothing would be launched for those before."""
    assert chunk_size == 65536 and noop_flag.dtype == torch.int32 and noop_flag.tolist() == [0]
    for tensors in zip(*tensor_lists, strict=True):
        assert len({tensor.numel() for tensor in tensors}) == 1 and all(tensor.is_contiguous() for tensor in tensors)
    assert tensor_lists[0][-1].numel()


def multi_tensor_l2norm(chunk_size, noop_flag, tensor_lists, per_tensor):
    check_lists(chunk_size, noop_flag, tensor_lists)
    assert len(tensor_lists) == 1 and per_tensor is False
    total = sum(tensor.float().square().sum() for tensor in tensor_lists[0])
    return total.sqrt().reshape(1), torch.empty(0)


def multi_tensor_scale(chunk_size, noop_flag, tensor_lists, scale):
    check_lists(chunk_size, noop_flag, tensor_lists)
    for source, target in zip(*tensor_lists, strict=True):
        target.copy_(source.float() * scale)
        noop_flag.fill_(0 if source.isfinite().all() else 1)


def adam(grads, weights, exp_avgs, exp_avg_sqs, lr, beta1, beta2, epsilon, step, mode, bias_correction, weight_decay):
    assert (mode, bias_correction) == (1, 1) and isinstance(step, int)
    for g, w, m, v in zip(grads, weights, exp_avgs, exp_avg_sqs, strict=True):
        m.copy_(beta1 * m + (1 - beta1) * g.float())
        v.copy_(beta2 * v + (1 - beta2) * g.float() ** 2)
        update = m / (1 - beta1**step) / ((v / (1 - beta2**step)).sqrt() + epsilon) + weight_decay * w
        w.sub_(lr * update)


def adam_of_one_type(chunk_size, noop_flag, tensor_lists, *numbers):
    check_lists(chunk_size, noop_flag, tensor_lists)
    assert len(tensor_lists) == 4
    assert all(tensor.dtype == torch.float32 for tensors in tensor_lists for tensor in tensors)
    adam(*tensor_lists, *numbers)


def adam_of_any_types(chunk_size, noop_flag, tensor_lists, *numbers):
    check_lists(chunk_size, noop_flag, tensor_lists)
    grads, params, *moments = tensor_lists[:4]
    masters = tensor_lists[4] if len(tensor_lists) == 5 else params
    assert all(tensor.dtype == torch.float32 for tensors in (*moments, masters) for tensor in tensors)
    adam(grads, masters, *moments, *numbers)
    for param, master in zip(params, masters, strict=True):
        param.copy_(master)


def wgrad(wide: torch.dtype | None) -> Callable:
    """For main gradients of a wider type, or of the inputs' own."""

    def accumulate(input, d_output, d_weight):
        assert input.dtype == d_output.dtype in HALVES and d_weight.dtype == (wide or input.dtype)
        assert all(tensor.dim() == 2 and tensor.is_contiguous() for tensor in (input, d_output, d_weight))
        assert d_weight.shape == (d_output.shape[1], input.shape[1]) and len(input) == len(d_output)
        d_weight.copy_(d_weight.float() + d_output.float().t() @ input.float())

    return accumulate
