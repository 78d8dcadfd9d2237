"""Stand-ins of apex and Transformer Engine for the CPU: the signatures, limits and conventions that the adapters use.

Each function checks the assumptions of the published one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megatron_core.ops import reference

HALVES = (torch.bfloat16, torch.float16)


class StandIns:
    """Importable modules, and the functions of them that were called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        self.called: list[str] = []

    def install(self, modules: dict[str, dict[str, object]]) -> None:
        """Make the content of ``modules`` importable by their names."""
        for name, content in modules.items():
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


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    return reference.rms_norm(x, weight, eps) if bias is None else reference.layer_norm(x, weight, bias, eps)


def fused_rms_norm_affine(input, weight, normalized_shape, eps=1e-6, memory_efficient=False):
    assert normalized_shape == [weight.numel()]
    return norm(input, weight, None, eps)


def fused_layer_norm_affine(input, weight, bias, normalized_shape, eps=1e-6, memory_efficient=False):
    assert normalized_shape == [weight.numel()]
    return norm(input, weight, bias, eps)


def layernorm_fwd(x, weight, bias, eps, ln_out, quantizer, otype, sm_margin, zero_centered_gamma):
    assert x.dim() == 2 and x.is_contiguous() and ln_out is None and quantizer is None
    assert otype == f"type of {x.dtype}" and (sm_margin, zero_centered_gamma) == (0, False)
    return norm(x, weight, bias, eps), None if bias is None else x.mean(-1), torch.full((len(x),), eps)


def rmsnorm_bwd(dz, x, rsigma, gamma, sm_margin, zero_centered_gamma, bias=None):
    assert dz.shape == x.shape and dz.is_contiguous() and (sm_margin, zero_centered_gamma) == (0, False)
    parameters = (gamma,) if bias is None else (gamma, bias)
    function = lambda x, gamma, bias=None: norm(x, gamma, bias, rsigma[0].item())  # noqa: E731
    return torch.func.vjp(function, x, *parameters)[1](dz)


def layernorm_bwd(dz, x, mu, rsigma, gamma, sm_margin, zero_centered_gamma):
    assert torch.equal(mu, x.mean(-1))
    return rmsnorm_bwd(dz, x, rsigma, gamma, sm_margin, zero_centered_gamma, torch.zeros_like(gamma))


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": lambda x: functional.gelu(x, approximate="tanh"),
    "srelu": lambda x: x.relu() ** 2,
    "geglu": lambda x: functional.gelu(x.chunk(2, -1)[0], approximate="tanh") * x.chunk(2, -1)[1],
    "swiglu": lambda x: functional.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
}


def activation_forward(input, quantizer, *, function):
    assert input.dim() == 2 and input.is_contiguous() and input.numel() and quantizer is None
    return function(input)


def activation_backward(grad, fwd_input, quantizer, *, function):
    assert grad.dim() == fwd_input.dim() == 2 and grad.is_contiguous() and quantizer is None
    return torch.func.vjp(function, fwd_input)[1](grad)[0]


def check_lists(chunk_size: int, noop_flag: Tensor, tensor_lists: list[list[Tensor]]) -> None:
    """Lists of contiguous tensors with equal sizes; if the last tensor were empty, the preceding ones would be
    skipped."""
    assert chunk_size == 65536 and noop_flag.dtype == torch.int32 and noop_flag.tolist() == [0]
    for tensors in zip(*tensor_lists, strict=True):
        assert len({tensor.numel() for tensor in tensors}) == 1 and all(tensor.is_contiguous() for tensor in tensors)
    assert tensor_lists[0][-1].numel()


def multi_tensor_l2norm(chunk_size, noop_flag, tensor_lists, per_tensor):
    check_lists(chunk_size, noop_flag, tensor_lists)
    assert len(tensor_lists) == 1 and per_tensor is False
    return sum(tensor.float().square().sum() for tensor in tensor_lists[0]).sqrt().reshape(1), torch.empty(0)


def multi_tensor_scale(chunk_size, noop_flag, tensor_lists, scale):
    check_lists(chunk_size, noop_flag, tensor_lists)
    for source, target in zip(*tensor_lists, strict=True):
        target.copy_(source.float() * scale)
        noop_flag.fill_(0 if source.isfinite().all() else 1)


def multi_tensor_adam(
    chunk_size,
    noop_flag,
    tensor_lists,
    lr,
    beta1,
    beta2,
    epsilon,
    step,
    mode,
    bias_correction,
    weight_decay,
    *,
    casts: bool,
):
    """apex's takes four lists of float32; Transformer Engine's ``casts`` gradients, with copies as a fifth list."""
    check_lists(chunk_size, noop_flag, tensor_lists)
    grads, params, *moments = tensor_lists[:4]
    masters = tensor_lists[4] if len(tensor_lists) == 5 else params
    assert (len(tensor_lists) == 4 or casts) and (mode, bias_correction) == (1, 1) and isinstance(step, int)
    of_float32 = (*moments, masters, *(() if casts else (grads,)))
    assert all(tensor.dtype == torch.float32 for tensors in of_float32 for tensor in tensors)
    for g, p, w, m, v in zip(grads, params, masters, *moments, strict=True):
        m.copy_(beta1 * m + (1 - beta1) * g.float())
        v.copy_(beta2 * v + (1 - beta2) * g.float() ** 2)
        w.sub_(lr * (m / (1 - beta1**step) / ((v / (1 - beta2**step)).sqrt() + epsilon) + weight_decay * w))
        p.copy_(w)


def multi_tensor(casts: bool) -> dict[str, object]:
    adam = partial(multi_tensor_adam, casts=casts)
    return {
        "multi_tensor_l2norm": multi_tensor_l2norm,
        "multi_tensor_scale": multi_tensor_scale,
        "multi_tensor_adam": adam,
    }


MODULES: dict[str, dict[str, dict[str, object]]] = {
    "apex": {
        "apex": {},
        "apex.normalization": {},
        "apex.normalization.fused_layer_norm": {
            "fused_rms_norm_affine": fused_rms_norm_affine,
            "fused_layer_norm_affine": fused_layer_norm_affine,
        },
        "fused_layer_norm_cuda": {},
        "amp_C": multi_tensor(casts=False),
    },
    "transformer_engine": {
        "transformer_engine": {},
        "transformer_engine.pytorch": {},
        "transformer_engine.pytorch.constants": {
            "TE_DType": {dtype: f"type of {dtype}" for dtype in (torch.float32, *HALVES)}
        },
        "transformer_engine_torch": {
            "rmsnorm_fwd": lambda x, weight, *rest: layernorm_fwd(x, weight, None, *rest),
            "layernorm_fwd": layernorm_fwd,
            "rmsnorm_bwd": rmsnorm_bwd,
            "layernorm_bwd": layernorm_bwd,
            **multi_tensor(casts=True),
            **{name: partial(activation_forward, function=f) for name, f in ACTIVATIONS.items()},
            **{f"d{name}": partial(activation_backward, function=f) for name, f in ACTIVATIONS.items()},
        },
    },
}
"""By library, the modules that its adapter imports."""
