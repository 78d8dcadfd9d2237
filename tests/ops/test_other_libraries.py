"""apex and Transformer Engine as bodies: absent, and, by stand-ins with their published signatures, present."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch
from torch import Tensor

from megatron_core.config import ModelConfig
from megatron_core.errors import ConfigError
from megatron_core.ops import add_rms_norm, backend, layer_norm, reference, rms_norm
from tests.ops.checks import draw
from tests.runs import tiny_run

BOTH = pytest.mark.parametrize("name", backend.LIBRARIES)
EPSILON = 1e-3


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **content: object) -> None:
    """A module ``name`` that can be found and imported."""
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    for key, value in content.items():
        setattr(module, key, value)
    monkeypatch.setitem(sys.modules, name, module)


def install_apex(monkeypatch: pytest.MonkeyPatch) -> None:
    """apex.normalization.fused_layer_norm, and the extension behind it."""

    def fused_rms_norm_affine(input, weight, normalized_shape, eps=1e-6, memory_efficient=False):
        assert normalized_shape == [weight.numel()]
        return reference.rms_norm(input, weight, eps)

    def fused_layer_norm_affine(input, weight, bias, normalized_shape, eps=1e-6, memory_efficient=False):
        assert normalized_shape == [weight.numel()]
        return reference.layer_norm(input, weight, bias, eps)

    stand_in(monkeypatch, "fused_layer_norm_cuda")
    stand_in(monkeypatch, "apex")
    stand_in(monkeypatch, "apex.normalization")
    functions = {f.__name__: f for f in (fused_rms_norm_affine, fused_layer_norm_affine)}
    stand_in(monkeypatch, "apex.normalization.fused_layer_norm", **functions)


def install_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformer_engine_torch, its functions on rows and without autograd, as in version 2."""

    def plain(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        return reference.rms_norm(x, weight, eps) if bias is None else reference.layer_norm(x, weight, bias, eps)

    def forward(x, weight, bias, eps, ln_out, quantizer, otype, sm_margin, zero_centered_gamma):
        assert x.dim() == 2 and x.is_contiguous() and ln_out is None and quantizer is None
        assert otype == f"type of {x.dtype}" and (sm_margin, zero_centered_gamma) == (0, False)
        mean = None if bias is None else x.mean(-1)
        return plain(x, weight, bias, eps), mean, torch.full((len(x),), eps)

    def backward(dz, x, rsigma, gamma, bias):
        assert dz.shape == x.shape and dz.is_contiguous()
        leaves = [t.detach().requires_grad_() for t in ((x, gamma) if bias is None else (x, gamma, bias))]
        with torch.enable_grad():
            y = plain(*leaves, *([None] if bias is None else []), rsigma[0].item())
            return torch.autograd.grad(y, leaves, dz)

    def rmsnorm_bwd(dz, x, rsigma, gamma, sm_margin, zero_centered_gamma):
        return backward(dz, x, rsigma, gamma, None)

    def layernorm_bwd(dz, x, mu, rsigma, gamma, sm_margin, zero_centered_gamma):
        assert torch.equal(mu, x.mean(-1))
        return backward(dz, x, rsigma, gamma, torch.zeros_like(gamma))

    stand_in(
        monkeypatch,
        "transformer_engine_torch",
        rmsnorm_fwd=lambda x, weight, eps, *rest: forward(x, weight, None, eps, *rest),
        layernorm_fwd=forward,
        rmsnorm_bwd=rmsnorm_bwd,
        layernorm_bwd=layernorm_bwd,
    )
    dtypes = {dtype: f"type of {dtype}" for dtype in (torch.float32, torch.bfloat16, torch.float16)}
    stand_in(monkeypatch, "transformer_engine")
    stand_in(monkeypatch, "transformer_engine.pytorch")
    stand_in(monkeypatch, "transformer_engine.pytorch.constants", TE_DType=dtypes)


INSTALL = {"apex": install_apex, "transformer_engine": install_transformer_engine}


@pytest.fixture
def installed(name: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The library by its stand-in, which serves on the CPU."""
    INSTALL[name](monkeypatch)
    monkeypatch.setattr(backend.LIBRARIES[name], "why_not", lambda device_type, dtype: None)
    return name


def results(function: Callable[..., Tensor], tensors: list[Tensor], dy: Tensor) -> list[Tensor]:
    y = function(*tensors, EPSILON)
    return [y, *torch.autograd.grad(y, tensors, dy)]


@BOTH
@pytest.mark.parametrize("shape", [(5, 1, 8), (3, 4, 8)], ids=str)
def test_a_library_that_is_installed_serves_what_it_has(installed: str, shape: tuple[int, ...]) -> None:  # C52
    x = draw(shape, torch.float32).transpose(0, 1).requires_grad_()
    dy = draw(shape, torch.float32, 1).transpose(0, 1)
    parameters = [draw((8,), torch.float32, seed).requires_grad_() for seed in (2, 3)]
    for op, plain, count in ((rms_norm, reference.rms_norm, 1), (layer_norm, reference.layer_norm, 2)):
        tensors = [x, *parameters[:count]]
        found = results(lambda *args, op=op: op(*args, backend=installed), tensors, dy)
        for mine, right in zip(found, results(plain, tensors, dy), strict=True):
            torch.testing.assert_close(mine, right)
    y, total = add_rms_norm(x, dy, parameters[0], EPSILON, backend=installed)
    assert torch.equal(total, x + dy)
    torch.testing.assert_close(y, reference.rms_norm(x + dy, parameters[0], EPSILON))


@BOTH
def test_a_run_says_which_library_serves_what(installed: str) -> None:
    said = backend.describe(installed, "cpu", torch.float32)
    name = {"apex": "apex", "transformer_engine": "Transformer Engine"}[installed]
    assert f"{name} for layer_norm, rms_norm" in said
    tiny_run(kernel_backend=installed)


@BOTH
def test_a_library_that_is_absent_is_an_error_that_says_how_to_get_it(name: str) -> None:
    if backend.LIBRARIES[name].why_not("cuda", torch.float32) is None:
        pytest.skip(f"{name} is installed here")
    way = {
        "apex": r"build apex from https://github.com/NVIDIA/apex",
        "transformer_engine": r"pip install \"transformer",
    }
    with pytest.raises(ConfigError, match=rf"kernel_backend='{name}': .*{way[name]}.*kernel_backend='auto'"):
        rms_norm(torch.randn(3, 8), torch.randn(8), backend=name)
    with pytest.raises(ConfigError, match=f"kernel_backend='{name}'"):
        tiny_run(kernel_backend=name)


@BOTH
def test_a_library_says_what_it_is_not_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    INSTALL[name](monkeypatch)
    library = backend.LIBRARIES[name]
    assert "is for cuda, not cpu" in library.why_not("cpu", torch.float32)
    assert "has no torch.float64" in library.why_not("cuda", torch.float64)
    assert library.why_not("cuda", torch.bfloat16) is None


def test_the_field_names_all_of_them() -> None:
    for name in ("auto", "native", "reference", *backend.LIBRARIES):
        assert ModelConfig(kernel_backend=name).kernel_backend == name
