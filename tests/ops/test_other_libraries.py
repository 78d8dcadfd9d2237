"""apex and Transformer Engine as backends: absent, and present as stand-ins with their published signatures."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from megatron_core import ops
from megatron_core.errors import ConfigError
from megatron_core.ops import backend, reference
from megatron_core.ops.libraries import is_absent
from megatron_core.training.step import train_step
from tests.ops.checks import assert_near, draw
from tests.ops.stand_ins import MODULES, StandIns
from tests.runs import tiny_run

BOTH = pytest.mark.parametrize("name", backend.LIBRARIES)
EPSILON = 1e-3
HALF, WIDE = torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    is_absent.cache_clear()
    yield
    is_absent.cache_clear()


@pytest.fixture
def stand_ins(name: str, monkeypatch: pytest.MonkeyPatch) -> StandIns:
    """The library with its stand-ins, which run on the CPU."""
    found = StandIns(monkeypatch)
    found.install(MODULES[name])
    monkeypatch.setattr(backend.LIBRARIES[name], "unavailable_reason", lambda op, device_type, dtype: None)
    return found


def strided(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Normal numbers with a strided last dim that require gradients."""
    return draw((*shape[:-1], 2 * shape[-1]), dtype, seed)[..., ::2].requires_grad_()


def masks(shape: tuple[int, ...]) -> Tensor:
    """A third of the keys is hidden, and all of the first query's."""
    hidden = draw(shape, WIDE, 5) > 0.4
    hidden[..., :1, :] = True
    return hidden


class Case(NamedTuple):
    """A call of ``ops.<op>``: shapes of tensors with gradients, other arguments, and the expected implementation."""

    op: str
    shapes: tuple[tuple[int, ...], ...]
    rest: tuple[Any, ...] = ()
    options: dict[str, Any] = {}  # noqa: RUF012
    apex: str | None = None
    engine: str | None = None
    """Beginnings of the names of each library's called functions; None if it does not support the call."""
    dtype: torch.dtype = WIDE


def softmax(
    shape: tuple[int, ...], mask: tuple[int, ...] | None = None, *, by: str | None, **options: Any
) -> list[Case]:
    """With a scale representable in 16 bits, and with another one; ``by`` is a form of ``libraries.softmax_form``."""
    hidden = None if mask is None else masks(mask)
    module, *_ = backend.LIBRARIES["apex"].softmaxes.get(by, (None,))
    _, forward, _ = backend.LIBRARIES["transformer_engine"].softmaxes.get(by, (None, "", None))
    engine = forward.removesuffix("_forward") or None
    scales = ((HALF, 0.125), (torch.float16, 0.3)) if by else ((options.pop("dtype", HALF), 0.125),)
    return [
        Case("attention_softmax", (shape,), (hidden,), {"scale": scale, **options}, module, engine, dtype)
        for dtype, scale in scales
    ]


def rope(shape: tuple[int, ...], table: tuple[int, ...], **how: Any) -> Case:
    angles = 3 * draw(table, WIDE, 1)
    taken = {"apex": "fused_rotary", "engine": "apply_rotary_pos_emb", **how}
    options = {"interleaved": taken.pop("interleaved", False)}
    return Case("rope", (shape,), (angles.cos(), angles.sin()), options, **taken)


def activations() -> Iterator[Case]:
    theirs = {"gelu_tanh": "gelu", "geglu_tanh": "geglu", "squared_relu": "srelu", "swiglu": "swiglu"}
    for kind in ("gelu_tanh", "geglu_tanh", "squared_relu", "swiglu", "gelu", "geglu"):
        yield Case("bias_activation", ((2, 3, 8), (8,)), (kind,), engine=theirs.get(kind))
    yield Case("bias_activation", ((3, 8),), (None, "swiglu"), engine="swiglu")
    yield Case("bias_activation", ((0, 8),), (None, "swiglu"))


CASES = [
    *[Case("rms_norm", (shape, (8,)), (EPSILON,), {}, "fused_rms", "rmsnorm") for shape in ((5, 1, 8), (3, 4, 8))],
    Case("layer_norm", ((3, 4, 8), (8,), (8,)), (EPSILON,), {}, "fused_layer", "layernorm"),
    *softmax((2, 4, 32, 32), by="triangle", causal=True),
    *softmax((8, 144, 144), by="triangle", causal=True),
    *softmax((2, 4, 24, 40), by="aligned", causal=True),
    *softmax((1, 3, 41, 24), by="aligned", causal=True),
    *softmax((1, 3, 24, 40), by="whole"),
    *softmax((2, 4, 24, 40), (2, 1, 24, 40), by="masked"),
    *softmax((2, 4, 24, 40), (1, 40), by="masked"),
    *softmax((3, 1, 5, 7), (3, 1, 5, 7), by="generic"),
    *softmax((5, 7), (5, 7), by="generic"),
    *softmax((2, 4, 32, 32), by=None, window=4),
    *softmax((2, 4, 32, 32), (2, 4, 32, 32), by=None),  # a mask of each head
    *softmax((2, 4, 32, 32), (2, 1, 32, 32), by=None, causal=True),
    *softmax((2, 4, 32, 32), by=None, causal=True, dtype=WIDE),
    *softmax((2, 4, 16, 16), by=None, causal=True),
    *softmax((2, 4, 36, 36), by=None, causal=True),
    *softmax((1, 3, 32, 32), by=None, causal=True),  # an odd number of heads
    *softmax((2, 4, 31, 32), by=None),
    *softmax((1, 4, 128, 128), by=None, causal=True),
    *softmax((0, 4, 32, 32), by=None, causal=True),
    rope((6, 2, 3, 8), (6, 1, 4)),
    rope((6, 2, 2, 3, 10), (6, 1, 4)),
    rope((6, 2, 8), (6, 1, 4)),
    rope((6, 2, 3, 8), (6, 4)),
    rope((6, 2, 3, 8), (6, 1, 4), interleaved=True, apex=None),
    rope((6, 2, 3, 8), (6, 1, 4), dtype=HALF, apex=None),  # apex rounds the tables
    rope((6, 2, 3, 8), (6, 2, 4), apex=None, engine=None),
    *activations(),
]


@BOTH
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.op} {case.shapes[0]}")
def test_results_and_gradients(name: str, stand_ins: StandIns, case: Case) -> None:  # C52
    """Compared with the reference in float64, also for a strided gradient, which must not be changed."""
    tensors = [strided(shape, case.dtype, seed) for seed, shape in enumerate(case.shapes)]
    widened = [x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in case.rest]

    def results(tensors: list[Tensor], rest: Any, by: str, dy: Callable[[Tensor], Tensor]) -> list[Tensor]:
        outputs = getattr(ops, case.op)(*tensors, *rest, **case.options, backend=by)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        slopes = [dy(strided(tuple(y.shape), case.dtype, 7).detach()).to(y.dtype) for y in outputs]
        kept = [slope.clone() for slope in slopes]
        grads = torch.autograd.grad(outputs, tensors, slopes)
        assert all(map(torch.equal, slopes, kept))
        return [*outputs, *grads]

    expected = results([x.detach().double().requires_grad_() for x in tensors], widened, "reference", lambda dy: dy)
    stand_ins.called.clear()
    for dy in (lambda dy: dy, torch.Tensor.contiguous):
        assert_near(results(tensors, case.rest, name, dy), expected, 8e-3 if case.dtype != WIDE else 1e-6, slack=1e-12)
    taken = case.apex if name == "apex" else case.engine
    assert bool(stand_ins.called) == (taken is not None)
    assert all(taken in called for called in stand_ins.called)


def selected(name: str, op: str, x: Tensor, *arguments: object) -> bool:
    return backend.select_backend_for(op, name, x, *arguments) == name


@BOTH
def test_sizes_beyond_their_limits_are_not_theirs(name: str, stand_ins: StandIns) -> None:
    def meta(*shape: int, dtype: torch.dtype = HALF) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    for size, taken in ((2**31 - 2**17, True), (2**31, False)):
        large = meta(size)
        assert selected(name, "multi_tensor", large, [large]) == taken
        scores = large.view(-1, 8, 128, 128)
        assert selected(name, "softmax", scores, scores, None, True, None) == taken
    for keys, taken in ((16384, True), (16392, False)):
        scores = meta(2, 4, 16, keys)
        assert selected(name, "softmax", scores, scores, None, False, None) == taken
    for keys, taken in ((8190, name == "apex"), (8196, False)):
        scores, mask = meta(2, 4, 3, keys), meta(3, keys, dtype=torch.bool)
        assert selected(name, "softmax", scores, scores, mask, False, None) == taken
    table = meta(4, 1, 1, dtype=WIDE)
    for x in (meta(4, 2**29, 1, 2, dtype=WIDE), meta(4, 2**30, dtype=WIDE)[:, None, None, :2]):
        assert not selected(name, "rope", x, x, table, table, False)
    x = torch.ones(4, 1, 1, 2)
    assert not selected(name, "rope", x, x, torch.ones(4, 1, 1).requires_grad_(), torch.ones(4, 1, 1), False)
    for count, taken in ((1024, True), (1025, name == "apex")):
        assert selected(name, "multi_tensor", x, [x] * count) == taken


@BOTH
def test_scores_and_masks_off_8_bytes(name: str, stand_ins: StandIns) -> None:
    scores = draw((2 * 4 * 24 * 40 + 1,), HALF)[1:].view(2, 4, 24, 40)
    mask = (draw((24 * 40 + 1,), WIDE) > 0)[1:].view(24, 40)
    found = ops.attention_softmax(scores, mask, backend=name)
    torch.testing.assert_close(found, reference.attention_softmax(scores, mask, 1.0, False, None))
    assert stand_ins.called


@BOTH
def test_what_is_wrong_is_the_same_error(name: str, stand_ins: StandIns) -> None:
    ones = torch.ones(7, 2)
    for said, call in {
        "mask is": lambda: ops.attention_softmax(draw((2, 4, 24, 40), HALF), masks((2, 1, 24, 24)), backend=name),
        "scores are": lambda: ops.attention_softmax(draw((1, 1, 2, 4, 40), HALF), backend=name),
        "rope: ": lambda: ops.rope(draw((7,), WIDE), ones, ones, backend=name),
        "kind='relu'": lambda: ops.bias_activation(draw((7, 8), WIDE), None, "relu", backend=name),
    }.items():
        with pytest.raises(ConfigError, match=said):
            call()


@pytest.mark.parametrize("name", ["transformer_engine"])
def test_tables_that_are_no_angles_are_an_error_of_transformer_engine(name: str, stand_ins: StandIns) -> None:
    x, angles = draw((6, 2, 3, 8), WIDE), draw((6, 1, 4), WIDE, 1)
    with pytest.raises(RuntimeError, match="are not cosines and sines of angles"):
        ops.rope(x, 1.1 * angles.cos(), 1.1 * angles.sin(), backend=name)


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


@pytest.mark.parametrize("name", ["apex"])
@pytest.mark.parametrize("wide", [WIDE, HALF], ids=str)
def test_weight_gradients(name: str, stand_ins: StandIns, wide: torch.dtype) -> None:
    grad_y, x = (strided((9, n), HALF, n).detach() for n in (4, 6))
    main_grad = draw((4, 6), wide)
    expected = (main_grad.double() + grad_y.double().t() @ x.double()).to(wide)
    ops.accumulate_weight_grad_(main_grad, grad_y, x, backend=name)
    torch.testing.assert_close(main_grad, expected)
    called = stand_ins.called.copy()
    assert called == [f"fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp{32 if wide == WIDE else 16}"]
    for beyond in (main_grad.new_zeros(6, 4).t(), torch.zeros(4, 6)):
        given = (grad_y.float(), x.float()) if beyond.is_contiguous() else (grad_y, x)
        ops.accumulate_weight_grad_(beyond, *given, backend=name)
        torch.testing.assert_close(beyond, (grad_y.double().t() @ x.double()).to(beyond.dtype))
    ops.accumulate_weight_grad_(main_grad, grad_y[:0], x[:0], backend=name)
    assert stand_ins.called == called


@BOTH
def test_second_derivatives_are_refused(name: str, stand_ins: StandIns) -> None:  # C52
    scores = strided((2, 4, 32, 32), HALF)
    (grad,) = torch.autograd.grad(
        ops.attention_softmax(scores, causal=True, backend=name).square().sum(), scores, create_graph=True
    )
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@BOTH
@pytest.mark.parametrize("loss", ["native", "linear"])
def test_a_run_takes_them_everywhere(name: str, stand_ins: StandIns, loss: str) -> None:
    settings = {
        **{"bf16": True, "seq_length": 32, "attention_backend": "unfused", "normalization": "RMSNorm", "swiglu": True},
        **{"position_embedding_type": "rope", "clip_grad": 0.01},
        **{"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": loss},
    }
    results = {by: train_step(tiny_run(kernel_backend=by, **settings)) for by in (name, "reference")}
    assert results[name].loss == pytest.approx(results["reference"].loss, rel=1e-3)
    assert results[name].grad_norm == pytest.approx(results["reference"].grad_norm, rel=2e-2)
    everywhere = {"multi_tensor_l2norm", "multi_tensor_adam"}
    of_apex = {"fused_rms_norm_affine", "wgrad_gemm_accum_fp32", "forward", "backward", "multi_tensor_scale"}
    upper = "scaled_upper_triang_masked_softmax"
    of_engine = {"rmsnorm_fwd", "rmsnorm_bwd", "swiglu", "dswiglu", f"{upper}_forward", f"{upper}_backward"}
    of_engine |= {"apply_rotary_pos_emb"}
    called = {called.rpartition(".")[2] for called in stand_ins.called}
    assert everywhere | (of_apex if name == "apex" else of_engine) <= called
    products = sum(called.endswith("wgrad_gemm_accum_fp32") for called in stand_ins.called)
    assert products == (4 * (2 * 4 + 1) if name == "apex" else 0)  # micro-batches, layers' matrices and the last one


@BOTH
def test_a_run_names_the_operations_of_a_library(name: str, stand_ins: StandIns) -> None:
    said = backend.describe(name, "cpu", HALF)
    title, parts = {
        "apex": ("apex", "multi_tensor, softmax"),
        "transformer_engine": ("Transformer Engine", "activation, multi_tensor, rope, softmax"),
    }[name]
    other = backend.describe("auto", "cpu", HALF).partition(" for ")[0]
    assert f"{title} for layer_norm, rms_norm" in said
    assert f"{title}, or for unsupported calls {other}, for {parts}" in said
    assert ("torch's own, for weight_grad" in said) == (name == "apex")
    in_float32 = backend.describe(name, "cpu", WIDE)
    taken = next(part for part in in_float32.split("; ") if "unsupported calls" in part)
    assert "rope" in taken and "softmax" not in taken and "weight_grad" not in in_float32


@BOTH
def test_a_library_that_is_absent_is_an_error_that_says_how_to_get_it(name: str) -> None:
    if backend.LIBRARIES[name].unavailable_reason("rms_norm", "cuda", WIDE) is None:
        pytest.skip(f"{name} is installed here")
    way = {"apex": "build apex with its CUDA extensions from", "transformer_engine": r"pip install \"transformer"}
    asked = rf"kernel_backend='{name}': .*{way[name]}.*kernel_backend='auto'"
    x, table = torch.randn(3, 8), torch.ones(3, 4)
    for call in (
        lambda: ops.rms_norm(x, x[0], backend=name),
        lambda: ops.attention_softmax(x.bfloat16(), backend=name),
        lambda: ops.rope(x, table, table, backend=name),
        lambda: ops.squared_norm([x], backend=name),
        lambda: tiny_run(kernel_backend=name),
        lambda: backend.describe(name, "cuda", HALF),
    ):
        with pytest.raises(ConfigError, match=asked):
            call()


@BOTH
def test_a_library_says_what_it_is_not_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    StandIns(monkeypatch).install(MODULES[name])
    library = backend.LIBRARIES[name]
    for op in library.OPS:
        assert "runs on cuda, not on cpu" in library.unavailable_reason(op, "cpu", WIDE)
        assert "does not support torch.float64" in library.unavailable_reason(op, "cuda", torch.float64)
        assert library.unavailable_reason(op, "cuda", HALF) is None
        assert library.supports_dtype(op, torch.float64)  # so that the call is refused, not run by another backend
    assert set(library.OPS) >= library.PARTIAL_OPS and not library.supports_dtype("cross_entropy", HALF)
    if name == "apex":
        monkeypatch.delitem(sys.modules, "scaled_softmax_cuda")
        is_absent.cache_clear()
        assert "scaled_softmax_cuda is not installed" in library.unavailable_reason("softmax", "cuda", HALF)
        assert library.unavailable_reason("rms_norm", "cuda", HALF) is None


@pytest.mark.parametrize("asked", ["auto", "reference"])
def test_they_are_not_loaded_unless_requested(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = {module.partition(".")[0] for modules in MODULES.values() for module in modules}

    class Watch:
        def find_spec(self, name: str, path: object = None, target: object = None) -> None:
            assert name.partition(".")[0] not in theirs, f"{name} is looked for"

    monkeypatch.setattr(sys, "meta_path", [Watch(), *sys.meta_path])
    settings = {"attention_backend": "unfused", "normalization": "RMSNorm", "position_embedding_type": "rope"}
    train_step(tiny_run(kernel_backend=asked, **settings))
