"""apex and Transformer Engine as backends: absent, and present as stand-ins with the published signatures."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from megatron_core import ops
from megatron_core.errors import ConfigError
from megatron_core.features.nvidia_libraries.libraries import LIBRARIES, is_absent
from megatron_core.ops import backend, reference
from megatron_core.training.step import train_step
from tests.ops.checks import assert_near, draw
from tests.ops.stand_ins import MODULES, StandIns
from tests.runs import tiny_run

BOTH = pytest.mark.parametrize("name", LIBRARIES)
EPSILON = 1e-3
HALF, WIDE = torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def clear_cache() -> Iterator[None]:
    is_absent.cache_clear()
    yield
    is_absent.cache_clear()


@pytest.fixture
def stand_ins(name: str, monkeypatch: pytest.MonkeyPatch) -> StandIns:
    """The library with its stand-ins, which run on the CPU."""
    found = StandIns(monkeypatch)
    found.install(MODULES[name])
    monkeypatch.setattr(LIBRARIES[name], "unavailable_reason", lambda op, device_type, dtype: None)
    return found


def strided(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Normal numbers with a strided last dim that require gradients."""
    return draw((*shape[:-1], 2 * shape[-1]), dtype, seed)[..., ::2].requires_grad_()


class Case(NamedTuple):
    """A call of ``ops.<op>``: shapes of tensors with gradients, other arguments, and the expected implementation."""

    op: str
    shapes: tuple[tuple[int, ...], ...]
    rest: tuple[Any, ...] = ()
    apex: str | None = None
    engine: str | None = None
    """Part of the names of each library's called functions; None if it does not support the call."""


def activations() -> Iterator[Case]:
    theirs = {"gelu_tanh": "gelu", "geglu_tanh": "geglu", "squared_relu": "srelu", "swiglu": "swiglu"}
    for kind in ("gelu_tanh", "geglu_tanh", "squared_relu", "swiglu", "gelu", "geglu"):
        yield Case("bias_activation", ((2, 3, 8), (8,)), (kind,), engine=theirs.get(kind))
    yield Case("bias_activation", ((3, 8),), (None, "swiglu"), engine="swiglu")
    yield Case("bias_activation", ((0, 8),), (None, "swiglu"))


CASES = [
    *[Case("rms_norm", (shape, (8,)), (EPSILON,), "fused_rms", "rmsnorm") for shape in ((5, 1, 8), (3, 4, 8))],
    Case("layer_norm", ((3, 4, 8), (8,), (8,)), (EPSILON,), "fused_layer", "layernorm"),
    *activations(),
]


@BOTH
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.op} {case.shapes[0]}")
def test_results_and_gradients(name: str, stand_ins: StandIns, case: Case) -> None:  # C52
    """Compared with the reference in float64, also for a strided gradient, which must not be changed."""
    tensors = [strided(shape, WIDE, seed) for seed, shape in enumerate(case.shapes)]

    def results(tensors: list[Tensor], by: str, dy: Callable[[Tensor], Tensor]) -> list[Tensor]:
        y = getattr(ops, case.op)(*tensors, *case.rest, backend=by)
        slope = dy(strided(tuple(y.shape), WIDE, 7).detach()).to(y.dtype)
        kept = slope.clone()
        grads = torch.autograd.grad(y, tensors, slope)
        assert torch.equal(slope, kept)
        return [y, *grads]

    expected = results([x.detach().double().requires_grad_() for x in tensors], "reference", lambda dy: dy)
    stand_ins.called.clear()
    for dy in (lambda dy: dy, torch.Tensor.contiguous):
        assert_near(results(tensors, name, dy), expected, 1e-6, slack=1e-12)
    taken = case.apex if name == "apex" else case.engine
    assert bool(stand_ins.called) == (taken is not None)
    assert all(taken in called for called in stand_ins.called)


@BOTH
def test_unsupported_lists_run_as_with_auto(name: str, stand_ins: StandIns) -> None:
    def is_supported(tensors: list[Tensor]) -> bool:
        return backend.select_backend_for("multi_tensor", name, tensors[0], tensors) == name

    for size, supported in ((2**31 - 2**17, True), (2**31, False)):
        assert is_supported([torch.empty(size, dtype=HALF, device="meta")]) == supported
    for count, supported in ((1024, True), (1025, name == "apex")):
        assert is_supported([torch.ones(4)] * count) == supported


@pytest.mark.parametrize("name", ["transformer_engine"])
def test_an_unknown_activation_is_an_error(name: str, stand_ins: StandIns) -> None:
    with pytest.raises(ConfigError, match="kind='tanh'"):
        ops.bias_activation(draw((7, 8), WIDE), None, "tanh", backend=name)


@BOTH
def test_softmax_and_rope_run_as_with_auto(name: str, stand_ins: StandIns) -> None:
    scores, x, angles = draw((2, 4, 32, 32), HALF), draw((6, 2, 3, 8), WIDE), draw((6, 1, 4), WIDE, 1)
    for call in (
        lambda by: ops.attention_softmax(scores, scale=0.3, causal=True, backend=by),
        lambda by: ops.rope(x, angles.cos(), angles.sin(), backend=by),
    ):
        assert torch.equal(call(name), call("auto"))
    assert stand_ins.called == []


def lists(dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """Some tensors, including empty ones, also as the last."""
    return [draw(shape, dtype, seed + i) for i, shape in enumerate([(3, 5), (0,), (7,), (0, 2)])]


@BOTH
@pytest.mark.parametrize("dtype", [WIDE, HALF, torch.float16], ids=str)
def test_squared_norm_and_scale(name: str, stand_ins: StandIns, dtype: torch.dtype) -> None:
    tensors = lists(dtype)
    found = ops.squared_norm(tensors, backend=name)
    assert found.dtype == torch.float64 and found.dim() == 0
    torch.testing.assert_close(found, reference.squared_norm(tensors), rtol=1e-6, atol=0.0)
    expected = [x * 0.3 for x in tensors]
    ops.scale_(tensors, 0.3, backend=name)
    for mine, right in zip(tensors, expected, strict=True):
        torch.testing.assert_close(mine, right)
    assert {called.rpartition(".")[2] for called in stand_ins.called} == {"multi_tensor_l2norm", "multi_tensor_scale"}
    tensors[2][0] = torch.inf
    assert ops.squared_norm(tensors, backend=name).isinf()
    ops.scale_([], 2.0, backend=name)
    assert ops.squared_norm([torch.empty(0)], backend=name) == 0


@BOTH
@pytest.mark.parametrize("grad_dtype", [WIDE, HALF], ids=str)
@pytest.mark.parametrize("copy_dtype", [None, HALF], ids=str)
@pytest.mark.parametrize("factor", [1.0, 0.25])
def test_adamw(
    name: str, stand_ins: StandIns, grad_dtype: torch.dtype, copy_dtype: torch.dtype | None, factor: float
) -> None:
    rates = {"lr": 0.1, "betas": (0.8, 0.9), "epsilon": 1e-4, "weight_decay": 0.1, "factor": factor}
    states = []
    for by in (name, "reference"):
        weights, means, squares = lists(WIDE, 10), lists(WIDE, 20), [x.square() for x in lists(WIDE, 30)]
        copies = [] if copy_dtype is None else [torch.empty_like(x, dtype=copy_dtype) for x in weights]
        ops.adamw_(lists(grad_dtype), weights, means, squares, copies, step=3, **rates, backend=by)
        states.append([*weights, *means, *squares, *copies])
    for mine, right in zip(*states, strict=True):
        torch.testing.assert_close(mine, right)
    passes = [called.rpartition(".")[2].removeprefix("multi_tensor_") for called in stand_ins.called]
    first = ["scale"] if factor != 1.0 or (name == "apex" and grad_dtype != WIDE) else []
    assert passes == [*first, "adam", *(["scale"] if name == "apex" and copy_dtype is not None else [])]


@pytest.mark.parametrize("name", ["transformer_engine"])
def test_second_derivatives_are_refused(name: str, stand_ins: StandIns) -> None:  # C52
    x, weight = strided((3, 8), WIDE), draw((8,), WIDE)
    (grad,) = torch.autograd.grad(ops.rms_norm(x, weight, backend=name).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@BOTH
@pytest.mark.parametrize("loss", ["native", "linear"])
def test_a_training_step_uses_the_library(name: str, stand_ins: StandIns, loss: str) -> None:
    settings = {
        **{"bf16": True, "seq_length": 32, "attention_backend": "unfused", "normalization": "RMSNorm", "swiglu": True},
        **{"position_embedding_type": "rope", "clip_grad": 0.01},
        **{"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": loss},
    }
    results = {by: train_step(tiny_run(kernel_backend=by, **settings)) for by in (name, "reference")}
    assert results[name].loss == pytest.approx(results["reference"].loss, rel=1e-3)
    assert results[name].grad_norm == pytest.approx(results["reference"].grad_norm, rel=2e-2)
    everywhere = {"multi_tensor_l2norm", "multi_tensor_adam"}
    of_apex = {"fused_rms_norm_affine", "multi_tensor_scale"}
    of_engine = {"rmsnorm_fwd", "rmsnorm_bwd", "swiglu", "dswiglu"}
    called = {called.rpartition(".")[2] for called in stand_ins.called}
    assert everywhere | (of_apex if name == "apex" else of_engine) <= called


@BOTH
def test_description_names_the_backend_of_each_operation(name: str, stand_ins: StandIns) -> None:
    said = backend.describe_backends(name, "cpu", HALF)
    title, parts = {
        "apex": ("apex", "multi_tensor"),
        "transformer_engine": ("Transformer Engine", "activation, multi_tensor"),
    }[name]
    other = backend.describe_backends("auto", "cpu", HALF).partition(" for ")[0]
    assert f"{title} for layer_norm, rms_norm" in said
    assert f"{title}, or for unsupported calls {other}, for {parts}" in said
    lacking = "cross_entropy, dropout, fp8, rope, softmax"
    assert f"{other} for {'activation, ' if name == 'apex' else ''}{lacking}" in said


@BOTH
def test_an_absent_library_is_an_error_with_instructions(name: str) -> None:
    if LIBRARIES[name].unavailable_reason("rms_norm", "cuda", WIDE) is None:
        pytest.skip(f"{name} is installed here")
    way = {"apex": "build apex with its CUDA extensions from", "transformer_engine": r"pip install \"transformer"}
    asked = rf"kernel_backend='{name}': .*{way[name]}.*kernel_backend='auto'"
    x = torch.randn(3, 8)
    for call in (
        lambda: ops.rms_norm(x, x[0], backend=name),
        lambda: ops.squared_norm([x], backend=name),
        lambda: tiny_run(kernel_backend=name),
        lambda: backend.describe_backends(name, "cuda", HALF),
    ):
        with pytest.raises(ConfigError, match=asked):
            call()


@BOTH
def test_unavailable_devices_dtypes_and_modules_are_reported(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    StandIns(monkeypatch).install(MODULES[name])
    library = LIBRARIES[name]
    for op in library.OPS:
        assert "runs on cuda, not on cpu" in library.unavailable_reason(op, "cpu", WIDE)
        assert "does not support torch.float64" in library.unavailable_reason(op, "cuda", torch.float64)
        assert library.unavailable_reason(op, "cuda", HALF) is None
    assert set(library.OPS) >= library.PARTIAL_OPS and "softmax" not in library.OPS
    if name == "apex":
        monkeypatch.delitem(sys.modules, "amp_C")
        is_absent.cache_clear()
        assert "amp_C is not installed" in library.unavailable_reason("multi_tensor", "cuda", HALF)
        assert library.unavailable_reason("rms_norm", "cuda", HALF) is None


@pytest.mark.parametrize("asked", ["auto", "reference"])
def test_libraries_are_not_imported_unless_requested(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = {module.partition(".")[0] for modules in MODULES.values() for module in modules}

    class Watch:
        def find_spec(self, name: str, path: object = None, target: object = None) -> None:
            assert name.partition(".")[0] not in theirs, f"{name} is looked for"

    monkeypatch.setattr(sys, "meta_path", [Watch(), *sys.meta_path])
    settings = {"attention_backend": "unfused", "normalization": "RMSNorm", "position_embedding_type": "rope"}
    train_step(tiny_run(kernel_backend=asked, **settings))
