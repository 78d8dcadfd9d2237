"""rms_norm and layer_norm: both native kernels against the definition in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_core.errors import ConfigError
from megatron_core.ops import layer_norm, reference, rms_norm
from tests.ops.checks import (
    ANY,
    AS_BUILT,
    BOUND,
    LOW,
    assert_near,
    draw,
    in_both_orders,
    poisoned_memory,
    views,
    with_threads,
)
from tests.runs import tiny_run

PLAIN = {"rms_norm": rms_norm, "layer_norm": layer_norm}
NORMS = pytest.mark.parametrize("norm", sorted(PLAIN))
EPSILON = 1e-3


def definition(norm: str, x: Tensor, *parameters: Tensor) -> Tensor:
    """The formulas of the papers, in the precision of the arguments."""
    centered = x - x.mean(-1, keepdim=True) if norm == "layer_norm" else x
    normed = centered / torch.sqrt((centered * centered).mean(-1, keepdim=True) + EPSILON)
    return normed * parameters[0] + (parameters[1] if norm == "layer_norm" else 0)


def parameters_of(norm: str, size: int, dtype: torch.dtype) -> list[Tensor]:
    count = 2 if norm == "layer_norm" else 1
    return [(draw((size,), dtype, 10 + i) + 0.5).requires_grad_() for i in range(count)]


def results(function: Callable[..., Tensor], x: Tensor, parameters: list[Tensor], dy: Tensor) -> list[Tensor]:
    """Output and all gradients."""
    x = x.detach().requires_grad_()
    y = function(x, *parameters)
    return [y, *torch.autograd.grad(y, [x, *parameters], dy.to(y.dtype))]


def exact(norm: str, x: Tensor, parameters: list[Tensor], dy: Tensor) -> list[Tensor]:
    wide = [p.detach().double().requires_grad_() for p in parameters]
    return results(lambda *args: definition(norm, *args), x.double(), wide, dy)


def check_plain(norm: str, x: Tensor, dy: Tensor) -> None:
    parameters = parameters_of(norm, x.shape[-1], x.dtype)
    native = results(lambda *args: PLAIN[norm](*args, EPSILON, backend="native"), x, parameters, dy)
    assert all(tensor.dtype == x.dtype for tensor in native)
    # In rows of a few elements dx is the remainder of cancelling terms, each as large as dy / sqrt(EPSILON).
    slack = 1e-6 * dy.double().norm().item() / EPSILON**0.5 if x.shape[-1] < 8 else 0.0
    assert_near(native, exact(norm, x, parameters, dy), BOUND[x.dtype], slack)


SHAPES = [(1, 1), (5, 7), (3, 2, 64), (2, 3, 2, 33), (70, 130), (2, 4096), (2, 65536), (3, 16391), (0, 8)]


@NORMS
@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_output_and_gradients_are_those_of_the_definition(
    kernels: str, norm: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:  # C55
    check_plain(norm, draw(shape, dtype), draw(shape, dtype, 1))


@pytest.mark.drawn(2)
@NORMS
@ANY
@given(shape=st.lists(st.integers(1, 9), min_size=1, max_size=3), size=st.integers(1, 300), dtype=st.sampled_from(LOW))
def test_any_shape(kernels: str, norm: str, shape: list[int], size: int, dtype: torch.dtype) -> None:
    check_plain(norm, draw((*shape, size), dtype), draw((*shape, size), dtype, 1))


@NORMS
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_inputs_and_gradients_need_not_be_contiguous(kernels: str, norm: str, dtype: torch.dtype) -> None:  # C22, C55
    x, dy = draw((4, 6, 32), dtype), draw((4, 6, 32), dtype, 1)
    parameters = parameters_of(norm, 32, dtype)
    expected = exact(norm, x, parameters, dy)
    for (name, x_view), (_, dy_view) in zip(views(x), views(dy), strict=True):
        assert not x_view.is_contiguous() and torch.equal(x_view, x), name
        for a, b in ((x_view, dy), (x, dy_view), (x_view, dy_view)):
            native = results(lambda *args: PLAIN[norm](*args, EPSILON, backend="native"), a, parameters, b)
            assert_near(native, expected, BOUND[dtype])


@NORMS
@pytest.mark.parametrize("shape", [(3, 5), (2, 3, 17), (2, 2, 2, 4)], ids=str)
def test_gradcheck(cpu_kernels: None, norm: str, shape: tuple[int, ...]) -> None:  # C55
    x = draw(shape, torch.float64).requires_grad_()
    parameters = parameters_of(norm, shape[-1], torch.float64)
    strided = x.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    for first in (x, strided):
        assert torch.autograd.gradcheck(lambda *a: PLAIN[norm](*a, EPSILON, backend="native"), (first, *parameters))


@AS_BUILT
@NORMS
def test_opcheck(kernels: str, norm: str) -> None:
    x, dy = (draw((3, 4, 24), torch.float32, seed).requires_grad_() for seed in range(2))
    parameters = parameters_of(norm, 24, torch.float32)
    ops = torch.ops.megatron_core
    for each in (x, x.transpose(0, 1)):
        torch.library.opcheck(getattr(ops, norm), (each, *parameters, EPSILON))
    with torch.no_grad():
        _, *statistics = getattr(ops, norm)(x, *parameters, EPSILON)
        inputs = (dy.detach(), x.detach(), parameters[0].detach(), *statistics)
    torch.library.opcheck(getattr(ops, f"{norm}_backward"), inputs)


@NORMS
def test_every_element_is_written(kernels: str, norm: str) -> None:
    """New memory is NaN here, and results have none."""
    with poisoned_memory():
        for shape in ((5, 7), (40, 130), (2, 4096)):
            check_plain(norm, draw(shape, torch.float32), draw(shape, torch.float32, 1))


@NORMS
def test_torch_compile_gives_the_same(cpu_kernels: None, norm: str) -> None:
    x, dy = draw((6, 40), torch.float32), draw((6, 40), torch.float32, 1)
    parameters = parameters_of(norm, 40, torch.float32)

    def function(*args: Tensor) -> Tensor:
        return PLAIN[norm](args[0] * 2, *args[1:], EPSILON, backend="native") + 1

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for mine, right in zip(results(compiled, x, parameters, dy), results(function, x, parameters, dy), strict=True):
        assert torch.equal(mine, right)


@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("backend", ["native", "reference"])
def test_every_norm_of_a_model_gets_a_gradient(cpu_kernels: None, normalization: str, backend: str) -> None:  # C52
    run = tiny_run(normalization=normalization, qk_layernorm=True, kernel_backend=backend)
    (model,) = run.stages.values()
    tokens = torch.arange(8).reshape(1, 8)
    model(tokens).square().sum().backward()
    norms = {name: p for name, p in model.named_parameters() if "norm" in name}
    assert len(norms) >= 5
    for name, parameter in norms.items():
        gradient = parameter.grad if parameter.grad is not None else parameter.main_grad
        assert gradient.abs().sum() > 0, name


@NORMS
def test_the_order_of_a_blocks_threads_does_not_matter(norm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reveals a missing barrier."""
    x, dy = draw((40, 4096), torch.float32), draw((40, 4096), torch.float32, 1)
    parameters = parameters_of(norm, 4096, torch.float32)
    first, second = in_both_orders(
        lambda: results(lambda *args: PLAIN[norm](*args, EPSILON, backend="native"), x, parameters, dy), monkeypatch
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@NORMS
@pytest.mark.parametrize("backend", ["native", "reference"])
def test_wrong_arguments_are_named(cpu_kernels: None, norm: str, backend: str) -> None:
    x, (weight, *rest) = draw((3, 8), torch.float32), parameters_of(norm, 8, torch.float32)
    with pytest.raises(ConfigError, match=r"weight is \[7\]; for x \[3, 8\] it must be \[8\]"):
        PLAIN[norm](x, weight[:7], *rest, backend=backend)
    with pytest.raises(ConfigError, match=r"weight is torch.float64 on cpu and x torch.float32 on cpu"):
        PLAIN[norm](x, weight.double(), *rest, backend=backend)


@NORMS
def test_extreme_values(kernels: str, norm: str) -> None:
    """Subnormal and largest float16 numbers, infinities and NaN are handled like in PyTorch's conversions."""
    x = torch.tensor([[6e-8, -3e-6, 5e-5, 65504.0], [1.0, 2.0, torch.inf, 0.0], [1.0, torch.nan, 0.0, 2.0]])
    for dtype in (torch.float16, torch.bfloat16):
        parameters = [p.detach()[:4] for p in parameters_of(norm, 4, dtype)]
        found = PLAIN[norm](x.to(dtype), *parameters, EPSILON, backend="native")
        expected = definition(norm, x.to(dtype).float(), *(p.float() for p in parameters)).to(dtype)
        assert torch.equal(found.isnan(), expected.isnan())
        torch.testing.assert_close(found, expected, equal_nan=True)


def test_the_reference_is_the_definition() -> None:
    x = draw((3, 4, 9), torch.float64)
    for norm, function in (("rms_norm", reference.rms_norm), ("layer_norm", reference.layer_norm)):
        parameters = parameters_of(norm, 9, torch.float64)
        torch.testing.assert_close(function(x, *parameters, EPSILON), definition(norm, x, *parameters))


@NORMS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_threads_do_not_change_a_bit(cpu_kernels: None, norm: str, dtype: torch.dtype) -> None:
    x, dy = draw((333, 130), dtype), draw((333, 130), dtype, 1)
    parameters = parameters_of(norm, 130, dtype)
    alone, *others = with_threads(
        lambda: results(lambda *args: PLAIN[norm](*args, EPSILON, backend="native"), x, parameters, dy)
    )
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(alone, other, strict=True))


@NORMS
@pytest.mark.parametrize("size", [64, 130])
def test_a_row_does_not_depend_on_the_others(kernels: str, norm: str, size: int) -> None:
    x, dy = draw((70, size), torch.float32), draw((70, size), torch.float32, 1)
    parameters = parameters_of(norm, size, torch.float32)

    def output_and_dx(rows: slice) -> list[Tensor]:
        return results(lambda *a: PLAIN[norm](*a, EPSILON, backend="native"), x[rows], parameters, dy[rows])[:2]

    for whole, alone in zip(output_and_dx(slice(None)), output_and_dx(slice(37, 38)), strict=True):
        assert torch.equal(whole[37:38], alone)


@NORMS
@pytest.mark.parametrize("backend", ["native", "reference"])
def test_an_empty_row_is_refused(cpu_kernels: None, norm: str, backend: str) -> None:
    parameters = [torch.empty(0)] * (2 if norm == "layer_norm" else 1)
    with pytest.raises(ConfigError, match=r"x is \[3, 0\]; its last dim must not be empty"):
        PLAIN[norm](torch.empty(3, 0), *parameters, backend=backend)
