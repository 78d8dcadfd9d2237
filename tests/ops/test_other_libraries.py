"""apex and Transformer Engine as bodies: absent, and, by stand-ins with their published signatures, present."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from megatron_core import ops
from megatron_core.config import ModelConfig
from megatron_core.errors import ConfigError
from megatron_core.ops import backend, reference
from megatron_core.training.step import train_step
from tests.ops.checks import assert_near, draw
from tests.ops.stand_ins import INSTALL, StandIns, forget
from tests.runs import tiny_run

BOTH = pytest.mark.parametrize("name", backend.LIBRARIES)
EPSILON = 1e-3
LOADED = (
    *("apex", "amp_C", "fused_layer_norm_cuda", "fused_rotary_positional_embedding", "fused_weight_gradient_mlp_cuda"),
    *("scaled_softmax_cuda", "scaled_masked_softmax_cuda", "generic_scaled_masked_softmax_cuda"),
    *("scaled_upper_triang_masked_softmax_cuda", "transformer_engine", "transformer_engine_torch"),
)
"""All that the adapters import."""


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    forget()
    yield
    forget()


@pytest.fixture
def stand_ins(name: str, monkeypatch: pytest.MonkeyPatch) -> StandIns:
    """The library by its stand-ins, which serve on the CPU."""
    found = StandIns(monkeypatch)
    INSTALL[name](found)
    monkeypatch.setattr(backend.LIBRARIES[name], "why_not", lambda op, device_type, dtype: None)
    return found


def strided(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Normal numbers whose last dim lies apart, and whose gradient is wanted."""
    return draw((*shape[:-1], 2 * shape[-1]), dtype, seed)[..., ::2].requires_grad_()


def with_gradients(function: Callable[..., Tensor], tensors: list[Tensor]) -> list[Tensor]:
    """The result, and the gradients for one that lies apart and is the same afterwards."""
    y = function(*tensors)
    dy = strided(tuple(y.shape), y.dtype, 7).detach()
    kept = dy.contiguous()
    grads = torch.autograd.grad(y, tensors, kept)
    assert torch.equal(kept, dy)
    for mine, right in zip(torch.autograd.grad(function(*tensors), tensors, dy), grads, strict=True):
        torch.testing.assert_close(mine, right)
    return [y, *grads]


def assert_like(
    found: Callable[..., Tensor], right: Callable[..., Tensor], tensors: list[Tensor], bound: float = 1e-6
) -> None:
    """The same results and gradients, the right ones being computed in float64."""
    wide = [tensor.detach().double().requires_grad_() for tensor in tensors]
    y = right(*wide)
    dy = strided(tuple(y.shape), tensors[0].dtype, 7).detach()
    assert_near(with_gradients(found, tensors), [y, *torch.autograd.grad(y, wide, dy.double())], bound, slack=1e-12)


@BOTH
@pytest.mark.parametrize("shape", [(5, 1, 8), (3, 4, 8)], ids=str)
def test_norms(name: str, stand_ins: StandIns, shape: tuple[int, ...]) -> None:  # C52
    x = strided(shape, torch.float32)
    parameters = [draw((8,), torch.float32, seed).requires_grad_() for seed in (2, 3)]
    for op, count in (("rms_norm", 1), ("layer_norm", 2)):
        own, plain = getattr(ops, op), getattr(reference, op)
        tensors = [x, *parameters[:count]]
        assert_like(lambda *t, f=own: f(*t, EPSILON, backend=name), lambda *t, f=plain: f(*t, EPSILON), tensors)
    assert len(stand_ins.called) >= 4
    y, total = ops.add_rms_norm(x, x, parameters[0], EPSILON, backend=name)
    assert torch.equal(total, x + x)
    torch.testing.assert_close(y, reference.rms_norm(x + x, parameters[0], EPSILON))


def masks(shape: tuple[int, ...]) -> Tensor:
    """A third of the keys hidden, and all of the first query's."""
    hidden = draw(shape, torch.float32, 5) > 0.4
    hidden[..., :1, :] = True
    return hidden


FORMS = [  # scores, mask, causal, the functions that serve
    ((2, 4, 32, 32), None, True, {"apex": "scaled_upper_triang_masked_softmax_cuda", "te": "scaled_upper_triang"}),
    ((8, 144, 144), None, True, {"apex": "scaled_upper_triang_masked_softmax_cuda", "te": "scaled_upper_triang"}),
    ((2, 4, 24, 40), None, True, {"te": "scaled_aligned_causal"}),
    ((1, 3, 41, 24), None, True, {"te": "scaled_aligned_causal"}),
    ((1, 3, 24, 40), None, False, {"apex": "scaled_softmax_cuda", "te": "scaled_softmax"}),
    ((2, 4, 24, 40), (2, 1, 24, 40), False, {"apex": "scaled_masked_softmax_cuda", "te": "scaled_masked_softmax"}),
    ((2, 4, 24, 40), (1, 40), False, {"apex": "scaled_masked_softmax_cuda", "te": "scaled_masked_softmax"}),
    ((3, 1, 5, 7), (3, 1, 5, 7), False, {"apex": "generic_scaled_masked_softmax_cuda"}),
    ((5, 7), (5, 7), False, {"apex": "generic_scaled_masked_softmax_cuda"}),
]


@BOTH
@pytest.mark.parametrize(("shape", "mask_shape", "causal", "by"), FORMS, ids=str)
@pytest.mark.parametrize(("dtype", "scale"), [(torch.bfloat16, 0.125), (torch.float16, 0.3)], ids=str)
def test_softmax(
    name: str,
    stand_ins: StandIns,
    shape: tuple[int, ...],
    mask_shape: tuple[int, ...] | None,
    causal: bool,
    by: dict[str, str],
    dtype: torch.dtype,
    scale: float,
) -> None:
    mask = None if mask_shape is None else masks(mask_shape)
    tensors = [strided(shape, dtype)]
    assert_like(
        lambda scores: ops.attention_softmax(scores, mask, scale=scale, causal=causal, backend=name),
        lambda scores: reference.attention_softmax(scores, mask, scale, causal, None),
        tensors,
        bound=8e-3,
    )
    wanted = by.get("apex" if name == "apex" else "te")
    prefix = "" if name == "apex" else "transformer_engine_torch."
    assert all(called.startswith(f"{prefix}{wanted}") for called in stand_ins.called)
    assert bool(stand_ins.called) == (wanted is not None)


BEYOND = {
    "a window": ((2, 4, 32, 32), torch.bfloat16, None, {"window": 4}),
    "a mask of each head": ((2, 4, 32, 32), torch.bfloat16, (2, 4, 32, 32), {}),
    "a mask and the triangle": ((2, 4, 32, 32), torch.bfloat16, (2, 1, 32, 32), {"causal": True}),
    "float32": ((2, 4, 32, 32), torch.float32, None, {"causal": True}),
    "16 keys": ((2, 4, 16, 16), torch.bfloat16, None, {"causal": True}),
    "keys that are no multiple of 8": ((2, 4, 36, 36), torch.bfloat16, None, {"causal": True}),
    "an odd number of heads": ((1, 3, 32, 32), torch.bfloat16, None, {"causal": True}),
    "an odd number of queries": ((2, 4, 31, 32), torch.bfloat16, None, {}),
    "four heads of a few keys": ((1, 4, 128, 128), torch.bfloat16, None, {"causal": True}),
    "nothing": ((0, 4, 32, 32), torch.bfloat16, None, {"causal": True}),
}


@BOTH
@pytest.mark.parametrize("case", BEYOND)
def test_softmax_that_none_of_their_kernels_computes(name: str, stand_ins: StandIns, case: str) -> None:
    shape, dtype, mask_shape, settings = BEYOND[case]
    scores, mask = draw(shape, dtype), None if mask_shape is None else masks(mask_shape)
    found = ops.attention_softmax(scores, mask, **settings, backend=name)
    assert torch.equal(found, ops.attention_softmax(scores, mask, **settings)) and not stand_ins.called


@BOTH
@pytest.mark.parametrize(("keys", "serves"), [(16384, True), (16392, False)])
def test_the_longest_rows(name: str, stand_ins: StandIns, keys: int, serves: bool) -> None:
    scores = torch.empty(2, 4, 16, keys, dtype=torch.bfloat16, device="meta")
    assert (backend.serving_call("softmax", name, scores, scores, None, False, None) == name) == serves


@BOTH
def test_scores_and_masks_off_8_bytes(name: str, stand_ins: StandIns) -> None:
    scores = draw((2 * 4 * 24 * 40 + 1,), torch.bfloat16)[1:].view(2, 4, 24, 40)
    mask = (draw((24 * 40 + 1,), torch.float32) > 0)[1:].view(24, 40)
    found = ops.attention_softmax(scores, mask, backend=name)
    torch.testing.assert_close(found, reference.attention_softmax(scores, mask, 1.0, False, None))
    assert stand_ins.called


@pytest.mark.parametrize("name", ["apex"])
@pytest.mark.parametrize(("keys", "serves"), [(8190, True), (8196, False)])
def test_the_longest_rows_of_any_length(name: str, stand_ins: StandIns, keys: int, serves: bool) -> None:
    scores = torch.empty(2, 4, 3, keys, dtype=torch.bfloat16, device="meta")
    mask = torch.empty(3, keys, dtype=torch.bool, device="meta")
    assert (backend.serving_call("softmax", name, scores, scores, mask, False, None) == name) == serves


@BOTH
def test_what_is_wrong_is_the_same_error(name: str, stand_ins: StandIns) -> None:
    with pytest.raises(ConfigError, match="mask is"):
        ops.attention_softmax(draw((2, 4, 24, 40), torch.bfloat16), masks((2, 1, 24, 24)), backend=name)
    for shape in ((7,), (1, 1, 2, 4, 40)):
        with pytest.raises(ConfigError, match="scores are"):
            ops.attention_softmax(draw(shape, torch.bfloat16), backend=name)
    with pytest.raises(ConfigError, match="rope: "):
        ops.rope(draw((7,), torch.float32), *[torch.ones(7, 2)] * 2, backend=name)
    with pytest.raises(ConfigError, match="kind='relu'"):
        ops.bias_activation(draw((7, 8), torch.float32), None, "relu", backend=name)


@BOTH
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("shape", [(6, 2, 3, 8), (6, 2, 2, 3, 10), (6, 2, 8)], ids=str)
def test_rope(name: str, stand_ins: StandIns, shape: tuple[int, ...], interleaved: bool) -> None:
    angles = 3 * draw((6, 1, 4), torch.float32, 1)
    for table in (angles, *([angles[:, 0]] if len(shape) == 4 else [])):
        cos, sin = table.cos(), table.sin()
        assert_like(
            lambda x, c=cos, s=sin: ops.rope(x, c, s, interleaved=interleaved, backend=name),
            lambda x, c=cos, s=sin: reference.rope(x, c.double(), s.double(), interleaved),
            [strided(shape, torch.float32)],
        )
    assert bool(stand_ins.called) == (name == "transformer_engine" or not interleaved)


@BOTH
def test_rope_that_they_do_not_take(name: str, stand_ins: StandIns) -> None:
    x, angles = draw((6, 2, 3, 8), torch.float32), draw((6, 2, 4), torch.float32, 1)
    found = ops.rope(x, angles.cos(), angles.sin(), backend=name)
    assert torch.equal(found, ops.rope(x, angles.cos(), angles.sin())) and not stand_ins.called
    cos, sin = angles[:, :1].cos(), angles[:, :1].sin()
    found = ops.rope(x.bfloat16(), cos, sin, backend=name)
    if name == "apex":  # it would round the tables
        assert torch.equal(found, ops.rope(x.bfloat16(), cos, sin)) and not stand_ins.called
    else:
        torch.testing.assert_close(found, reference.rope(x.bfloat16(), cos, sin, False))
    assert backend.serving_call("rope", name, x, x, cos.requires_grad_(), sin, False) != name


@pytest.mark.parametrize("name", ["transformer_engine"])
def test_tables_that_are_no_angles_are_an_error_of_transformer_engine(name: str, stand_ins: StandIns) -> None:
    x, angles = draw((6, 2, 3, 8), torch.float32), draw((6, 1, 4), torch.float32, 1)
    with pytest.raises(RuntimeError, match="rope takes angles"):
        ops.rope(x, 1.1 * angles.cos(), 1.1 * angles.sin(), backend=name)


@pytest.mark.parametrize("name", ["transformer_engine"])
@pytest.mark.parametrize("kind", ["gelu_tanh", "geglu_tanh", "squared_relu", "swiglu", "gelu", "geglu"])
def test_activations(name: str, stand_ins: StandIns, kind: str) -> None:
    bias = draw((8,), torch.float32, 1).requires_grad_()
    for tensors in ([strided((2, 3, 8), torch.float32), bias], [strided((3, 8), torch.float32)]):
        assert_like(
            lambda x, b=None: ops.bias_activation(x, b, kind, backend=name),
            lambda x, b=None: reference.bias_activation(x, b, kind),
            tensors,
        )
    assert ops.bias_activation(torch.empty(0, 8), None, kind, backend=name).shape == (0, 4 if "glu" in kind else 8)
    theirs = {"gelu_tanh": "gelu", "geglu_tanh": "geglu", "squared_relu": "srelu", "swiglu": "swiglu"}.get(kind)
    wanted = {f"transformer_engine_torch.{way}{theirs}" for way in ("", "d")} if theirs else set()
    assert set(stand_ins.called) == wanted


def lists(dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """Some tensors, empty ones among them and last."""
    return [draw(shape, dtype, seed + i) for i, shape in enumerate([(3, 5), (0,), (7,), (0, 2)])]


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
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
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("copy_dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("factor", [1.0, 0.25])
def test_adamw(
    name: str, stand_ins: StandIns, grad_dtype: torch.dtype, copy_dtype: torch.dtype | None, factor: float
) -> None:
    found, right = (
        [
            lists(grad_dtype),
            lists(torch.float32, 10),
            lists(torch.float32, 20),
            [x.square() for x in lists(torch.float32, 30)],
            [] if copy_dtype is None else [torch.empty_like(x, dtype=copy_dtype) for x in lists(torch.float32)],
        ]
        for _ in range(2)
    )
    rates = {"lr": 0.1, "betas": (0.8, 0.9), "epsilon": 1e-4, "weight_decay": 0.1, "factor": factor}
    ops.adamw_(*found, step=3, **rates, backend=name)
    ops.adamw_(*right, step=3, **rates, backend="reference")
    for mine, theirs in zip(found[1:], right[1:], strict=True):
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b)
    passes = [called.rpartition(".")[2].removeprefix("multi_tensor_") for called in stand_ins.called]
    first = ["scale"] if factor != 1.0 or (name == "apex" and grad_dtype != torch.float32) else []
    assert passes == [*first, "adam", *(["scale"] if name == "apex" and copy_dtype is not None else [])]


@BOTH
def test_tensors_beyond_32_bits_are_not_theirs(name: str, stand_ins: StandIns) -> None:
    for size, serves in ((2**31 - 2**17, True), (2**31, False)):
        large = torch.empty(size, dtype=torch.bfloat16, device="meta")
        assert (backend.serving_call("multi_tensor", name, large, [large]) == name) == serves
        scores = large.view(-1, 8, 128, 128)
        assert (backend.serving_call("softmax", name, scores, scores, None, True, None) == name) == serves
    table = torch.empty(4, 1, 1, device="meta")
    for x in (torch.empty(4, 2**29, 1, 2, device="meta"), torch.empty(4, 2**30, device="meta")[:, None, None, :2]):
        assert backend.serving_call("rope", name, x, x, table, table, False) != name


@pytest.mark.parametrize("name", ["transformer_engine"])
def test_more_tensors_than_transformer_engine_takes(name: str, stand_ins: StandIns) -> None:
    for count, serves in ((1024, True), (1025, False)):
        tensors = [torch.ones(1)] * count
        assert ops.squared_norm(tensors, backend=name) == count
        assert bool(stand_ins.called) == serves
        stand_ins.called.clear()


@pytest.mark.parametrize("name", ["apex"])
@pytest.mark.parametrize("wide", [torch.float32, torch.bfloat16], ids=str)
def test_weight_gradients(name: str, stand_ins: StandIns, wide: torch.dtype) -> None:
    grad_y, x = (strided((9, n), torch.bfloat16, n).detach() for n in (4, 6))
    main_grad = draw((4, 6), wide)
    expected = (main_grad.double() + grad_y.double().t() @ x.double()).to(wide)
    ops.accumulate_weight_grad_(main_grad, grad_y, x, backend=name)
    torch.testing.assert_close(main_grad, expected)
    served = stand_ins.called.copy()
    assert served == [f"fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp{32 if wide == torch.float32 else 16}"]
    for beyond in (main_grad.new_zeros(6, 4).t(), torch.zeros(4, 6)):
        given = (grad_y.float(), x.float()) if beyond.is_contiguous() else (grad_y, x)
        ops.accumulate_weight_grad_(beyond, *given, backend=name)
        torch.testing.assert_close(beyond, (grad_y.double().t() @ x.double()).to(beyond.dtype))
    ops.accumulate_weight_grad_(main_grad, grad_y[:0], x[:0], backend=name)
    assert stand_ins.called == served


@BOTH
def test_second_derivatives_are_refused(name: str, stand_ins: StandIns) -> None:  # C52
    scores = strided((2, 4, 32, 32), torch.bfloat16)
    x, table = strided((6, 2, 3, 8), torch.float32), torch.tensor(0.5).expand(6, 1, 4)
    results = [ops.attention_softmax(scores, causal=True, backend=name).square().sum()]
    if name == "apex":
        results.append(ops.rope(x, table.cos(), table.sin(), backend=name).square().sum())
    else:
        results += [f(x, None, backend=name).square().sum() for f in (ops.bias_swiglu, ops.bias_squared_relu)]
        results.append(ops.rms_norm(x, torch.ones(8), EPSILON, backend=name).square().sum())
    for result, leaf in zip(results, [scores, *[x] * 3], strict=False):
        (grad,) = torch.autograd.grad(result, leaf, create_graph=True)
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
    results = {body: train_step(tiny_run(kernel_backend=body, **settings)) for body in (name, "reference")}
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
def test_a_run_says_which_library_serves_what(name: str, stand_ins: StandIns) -> None:
    said = backend.describe(name, "cpu", torch.bfloat16)
    title, parts = {
        "apex": ("apex", "multi_tensor, softmax"),
        "transformer_engine": ("Transformer Engine", "activation, multi_tensor, rope, softmax"),
    }[name]
    other = backend.describe("auto", "cpu", torch.bfloat16).partition(" for ")[0]
    assert f"{title} for layer_norm, rms_norm" in said
    assert f"{title}, or for calls that it does not take {other}, for {parts}" in said
    assert ("torch's own, for weight_grad" in said) == (name == "apex")
    in_float32 = backend.describe(name, "cpu", torch.float32)
    taken = next(part for part in in_float32.split("; ") if "does not take" in part)
    assert "rope" in taken and "softmax" not in taken and "weight_grad" not in in_float32


@BOTH
def test_a_library_that_is_absent_is_an_error_that_says_how_to_get_it(name: str) -> None:
    if backend.LIBRARIES[name].why_not("rms_norm", "cuda", torch.float32) is None:
        pytest.skip(f"{name} is installed here")
    way = {
        "apex": r"build apex from https://github.com/NVIDIA/apex",
        "transformer_engine": r"pip install \"transformer",
    }
    asked = rf"kernel_backend='{name}': .*{way[name]}.*kernel_backend='auto'"
    x = torch.randn(3, 8)
    table = torch.ones(3, 4)
    for call in (
        lambda: ops.rms_norm(x, x[0], backend=name),
        lambda: ops.attention_softmax(x.bfloat16(), backend=name),
        lambda: ops.rope(x, table, table, backend=name),
        lambda: ops.squared_norm([x], backend=name),
        lambda: tiny_run(kernel_backend=name),
        lambda: backend.describe(name, "cuda", torch.bfloat16),
    ):
        with pytest.raises(ConfigError, match=asked):
            call()


def test_an_extension_of_apex_that_was_not_built_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    INSTALL["apex"](StandIns(monkeypatch))
    monkeypatch.delitem(sys.modules, "scaled_softmax_cuda")
    library = backend.LIBRARIES["apex"]
    assert "apex's extension scaled_softmax_cuda is not" in library.why_not("softmax", "cuda", torch.bfloat16)
    assert library.why_not("rms_norm", "cuda", torch.bfloat16) is None


@BOTH
def test_a_library_says_what_it_is_not_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    INSTALL[name](StandIns(monkeypatch))
    library = backend.LIBRARIES[name]
    for op in library.OPS:
        assert "is for cuda, not cpu" in library.why_not(op, "cpu", torch.float32)
        assert "has no torch.float64" in library.why_not(op, "cuda", torch.float64)
        assert library.why_not(op, "cuda", torch.bfloat16) is None
        assert library.covers(op, torch.float64)  # so that it is refused, not served by another
    assert set(library.OPS) >= library.LIMITED and not library.covers("cross_entropy", torch.bfloat16)


@pytest.mark.parametrize("asked", ["auto", "reference"])
def test_nobody_loads_them_who_has_not_asked(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Watch:
        def find_spec(self, name: str, path: object = None, target: object = None) -> None:
            assert name.partition(".")[0] not in LOADED, f"{name} is looked for"

    monkeypatch.setattr(sys, "meta_path", [Watch(), *sys.meta_path])
    x, table = torch.randn(3, 8), torch.ones(3, 4)
    ops.rms_norm(x, x[0], backend=asked)
    ops.attention_softmax(x, backend=asked)
    ops.bias_swiglu(x, None, backend=asked)
    ops.rope(x, table, table, backend=asked)
    ops.squared_norm([x], backend=asked)
    train_step(tiny_run(kernel_backend=asked))


def test_the_field_names_all_of_them() -> None:
    for name in ("auto", "native", "reference", *backend.LIBRARIES):
        assert ModelConfig(kernel_backend=name).kernel_backend == name
