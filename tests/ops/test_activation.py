"""bias_activation: both native kernels against the definition in float64."""

from __future__ import annotations

from collections.abc import Callable
from math import pi, sqrt

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_core.errors import ConfigError
from megatron_core.ops import bias_activation
from megatron_core.ops.activation import GATED, NUMBERS, xielu
from tests.ops import libraries
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

KINDS = pytest.mark.parametrize("kind", NUMBERS)
ONE_OF_EACH = pytest.mark.parametrize("kind", ["gelu", "swiglu"])
BIAS = pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "no bias"])


def exponent(x: Tensor) -> Tensor:
    """2 u of gelu(x) = x (1 + tanh(u)) / 2 = x / (1 + exp(-2 u))."""
    return 2 * sqrt(2 / pi) * (x + 0.044715 * x**3)


def curve(kind: str, x: Tensor) -> Tensor:
    """f(x) as in the papers, but without differences that would lose accuracy in the left tail."""
    if kind == "squared_relu":
        return x.clamp(min=0) ** 2
    if kind in ("gelu", "geglu"):
        return x * torch.special.erfc(-x / sqrt(2)) / 2
    return x * torch.sigmoid(x if kind == "swiglu" else exponent(x))


def definition(kind: str, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """y = f(x + bias) in the precision of the arguments."""
    total = x if bias is None else x + bias
    if kind not in GATED:
        return curve(kind, total)
    half = total.shape[-1] // 2
    return curve(kind, total[..., :half]) * total[..., half:]


def native(kind: str, x: Tensor, bias: Tensor | None = None) -> Tensor:
    return bias_activation(x, bias, kind, backend="native")


def shapes_of(kind: str, *shape: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of x and of y."""
    return (*shape[:-1], shape[-1] * (2 if kind in GATED else 1)), shape


def tensors(kind: str, shape: tuple[int, ...], dtype: torch.dtype, with_bias: bool = True) -> tuple[Tensor, ...]:
    """x, bias and dy for an output of ``shape``."""
    x_shape, y_shape = shapes_of(kind, *shape)
    return draw(x_shape, dtype), draw(x_shape[-1:], dtype, 1) if with_bias else None, draw(y_shape, dtype, 2)


def results(function: Callable[..., Tensor], x: Tensor, bias: Tensor | None, dy: Tensor) -> list[Tensor]:
    """Output and all gradients."""
    leaves = [tensor.detach().requires_grad_() for tensor in (x, bias) if tensor is not None]
    y = function(*leaves)
    return [y, *torch.autograd.grad(y, leaves, dy.to(y.dtype))]


def check(kind: str, x: Tensor, bias: Tensor | None, dy: Tensor) -> None:
    found = results(lambda *args: native(kind, *args), x, bias, dy)
    assert all(tensor.dtype == x.dtype for tensor in found)
    wide_bias = None if bias is None else bias.double()
    expected = results(lambda *args: definition(kind, *args), x.double(), wide_bias, dy)
    # Derivatives pass through zero, and sums of dx over rows may: the bound is relative to their terms.
    assert_near(found, expected, BOUND[x.dtype], 1e-6 * dy.double().norm().item())


SHAPES = [(9,), (1, 1), (5, 7), (3, 2, 64), (2, 3, 2, 33), (70, 130), (5, 2056), (2, 2059), (0, 8)]


@KINDS
@BIAS
@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_output_and_gradients_are_those_of_the_definition(
    kernels: str, kind: str, with_bias: bool, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:  # C55
    check(kind, *tensors(kind, shape, dtype, with_bias))


@ANY
@given(
    kind=st.sampled_from(sorted(NUMBERS)),
    shape=st.lists(st.integers(1, 9), max_size=3),
    size=st.integers(1, 300),
    dtype=st.sampled_from(LOW),
    with_bias=st.booleans(),
)
def test_any_shape(kernels: str, kind: str, shape: list[int], size: int, dtype: torch.dtype, with_bias: bool) -> None:
    check(kind, *tensors(kind, (*shape, size), dtype, with_bias))


@KINDS
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_inputs_and_gradients_need_not_be_contiguous(kernels: str, kind: str, dtype: torch.dtype) -> None:  # C22, C55
    x, dy = draw((4, 6, 32), dtype), draw((4, 6, 32), dtype, 1)
    bias = draw((32, 2), dtype, 2)[:, 0]
    for (name, x_view), (_, dy_view) in zip(views(x), views(dy), strict=True):
        assert not x_view.is_contiguous() and torch.equal(x_view, x), name
        dy_view = dy_view[..., :16] if kind in GATED else dy_view
        dy_plain = dy_view.contiguous()
        for a, b in ((x_view, dy_plain), (x, dy_view), (x_view, dy_view)):
            check(kind, a, bias, b)


def grid(kind: str) -> Tensor:
    """Points where activations bend, their tails to the end of float32, and its smallest and largest numbers; ``[*,
    64]``."""
    sizes = torch.cat([torch.linspace(0, 20, 4096), torch.logspace(-38, 18, 2000), torch.linspace(80, 120, 256)])
    x = torch.cat([sizes, -sizes, torch.tensor([0.0, -0.0, 1e-44, -1e-44])])
    x = x[: len(x) // 64 * 64].reshape(-1, 64)
    return x.clamp(-1e10, 1e10) if kind == "squared_relu" else x


def every_number(dtype: torch.dtype) -> Tensor:
    """All 16-bit numbers up to 30,000; ``[*, 64]``."""
    x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    x = x[x.float().abs() <= 3e4]
    return torch.cat([x, x[: -len(x) % 64]]).reshape(-1, 64)


@KINDS
def test_values_and_slopes_have_the_relative_accuracy_of_float32(kernels: str, kind: str) -> None:
    """Also in the tails, down to the underflow of float64 rounded to float32."""
    x = grid(kind)
    args = torch.cat([x, torch.ones_like(x)], -1) if kind in GATED else x
    found, gradient = results(lambda x: native(kind, x), args, None, torch.ones_like(x))
    value, slope = results(lambda x: curve(kind, x), x.double(), None, torch.ones_like(x))
    unit = torch.finfo(torch.float32).eps * torch.ones_like(value)
    if kind in ("gelu_tanh", "geglu_tanh"):
        unit *= 1 + exponent(x.double()).abs().clamp(max=200) / 2  # exp(u + d) = exp(u) (1 + d), and d is rounding
    smallest = torch.finfo(torch.float32).smallest_normal * unit
    exp = (
        1 if kernels == "cuda" else 0
    )  # one unit more: the device's expf is accurate to one, the C library's to half a unit
    least = 2 * smallest * x.double().abs().clamp(min=1)
    assert ((found - value).abs() <= (4 + exp) * unit * value.abs() + least).all()
    terms = slope.abs() + torch.where(x == 0, 0.5, value / x.double()).abs()  # slope = G + x G'
    error = (gradient[:, : x.shape[1]] - slope).abs()
    assert (error <= (5 + exp) * unit * terms + least).all()


@KINDS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_values_and_slopes_of_16_bits_are_all_but_rounded_once(kernels: str, kind: str, dtype: torch.dtype) -> None:
    x = every_number(dtype)
    args = torch.cat([x, torch.ones_like(x)], -1) if kind in GATED else x
    found, gradient = results(lambda x: native(kind, x), args, None, torch.ones_like(x))
    value, slope = results(lambda x: curve(kind, x), x.double(), None, torch.ones_like(x).double())
    most, half_unit = torch.finfo(dtype).max, torch.finfo(dtype).eps / 2
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    error = (found.double().clamp(max=most) - value.clamp(max=most)).abs()
    assert (error <= 1.1 * half_unit * value.abs() + smallest).all()
    terms = slope.abs() + torch.where(x == 0, 0.5, value / x.double()).abs()  # slope = G + x G'
    error = (gradient[:, : x.shape[1]].double().clamp(max=most) - slope.clamp(max=most)).abs()
    assert (error <= half_unit * slope.abs() + 0.1 * half_unit * terms + smallest * x.abs().clamp(min=1)).all()


@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_infinities_and_nan(kernels: str, kind: str, dtype: torch.dtype) -> None:
    """Values and derivatives at the ends are their limits, and NaN stays NaN."""
    x = torch.tensor([[torch.inf, -torch.inf, torch.nan, 3e38, -3e38]]).to(dtype)
    args = torch.cat([x, torch.ones_like(x)], -1) if kind in GATED else x
    found, gradient = results(lambda x: native(kind, x), args, None, torch.ones_like(x))
    square = kind == "squared_relu"
    values = torch.tensor([[torch.inf, 0.0, torch.nan, torch.inf if square else 3e38, 0.0]])
    slopes = torch.tensor([[torch.inf, 0.0, torch.nan, torch.inf, 0.0] if square else [1.0, 0.0, torch.nan, 1.0, 0.0]])
    torch.testing.assert_close(found, values.to(dtype), equal_nan=True)
    torch.testing.assert_close(gradient[:, :5], slopes.to(dtype), equal_nan=True)


@KINDS
def test_the_ends_of_float16(kernels: str, kind: str) -> None:
    """Subnormal and largest numbers, and sums with the bias beyond them, are rounded once."""
    x = torch.tensor([[6e-8, -3e-6, 5e-5, 65504.0, -65504.0, 40000.0, -40000.0, 300.0]]).to(torch.float16)
    bias = torch.tensor([0.0, 0, 0, 0, 0, 40000.0, -40000.0, 0]).to(torch.float16)
    if kind in GATED:
        x, bias = torch.cat([x, torch.ones_like(x)], -1), torch.cat([bias, torch.zeros_like(bias)])
    expected = definition(kind, x.double(), bias.double()).to(torch.float16)
    torch.testing.assert_close(native(kind, x, bias), expected, rtol=1e-3, atol=6e-8)


@KINDS
@pytest.mark.parametrize("shape", [(5,), (3, 3), (2, 1, 3), (2, 1, 2, 2)], ids=str)
def test_gradcheck(cpu_kernels: None, kind: str, shape: tuple[int, ...]) -> None:  # C55
    x, bias, _ = tensors(kind, shape, torch.float64, with_bias=len(shape) > 1)
    for first in (x, x.transpose(0, -1).contiguous().transpose(0, -1)):
        leaves = [tensor.detach().requires_grad_() for tensor in (first, bias) if tensor is not None]
        assert torch.autograd.gradcheck(lambda *args: native(kind, *args), leaves)


@KINDS
@BIAS
def test_float64(cpu_kernels: None, kind: str, with_bias: bool) -> None:
    x, bias, dy = tensors(kind, (40, 33), torch.float64, with_bias)
    x = 3 * x
    found = results(lambda *args: native(kind, *args), x, bias, dy)
    assert_near(found, results(lambda *args: definition(kind, *args), x, bias, dy), BOUND[torch.float64])


@AS_BUILT
@ONE_OF_EACH
@BIAS
def test_opcheck(kernels: str, kind: str, with_bias: bool) -> None:
    x, bias, dy = tensors(kind, (3, 4, 24), torch.float32, with_bias)
    ops = torch.ops.megatron_core
    torch.library.opcheck(ops.bias_activation_backward, (dy, x, bias, kind))
    torch.library.opcheck(ops.bias_activation_backward, (dy.transpose(0, 1), x.transpose(0, 1), bias, kind))
    bias = None if bias is None else bias.requires_grad_()
    torch.library.opcheck(ops.bias_activation, (x.requires_grad_(), bias, kind))


@KINDS
def test_every_element_is_written(kernels: str, kind: str) -> None:
    """New memory is NaN here, and results have none."""
    with poisoned_memory():
        for shape in ((5, 7), (40, 130), (0, 8)):
            for with_bias in (True, False):
                check(kind, *tensors(kind, shape, torch.float32, with_bias))


@ONE_OF_EACH
@BIAS
def test_torch_compile_gives_the_same(cpu_kernels: None, kind: str, with_bias: bool) -> None:
    x, bias, dy = tensors(kind, (6, 40), torch.float32, with_bias)

    def function(x: Tensor, *bias: Tensor) -> Tensor:
        return native(kind, x * 2, *bias) + 1

    torch.compiler.reset()  # previous compilations for another kind would count as recompilations
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for mine, right in zip(results(compiled, x, bias, dy), results(function, x, bias, dy), strict=True):
        assert torch.equal(mine, right)


def test_nothing_but_x_and_the_bias_is_kept_for_backward(cpu_kernels: None) -> None:
    x, bias, _ = tensors("swiglu", (6, 40), torch.float32)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        native("swiglu", x.requires_grad_(), bias.requires_grad_())
    assert [tensor.data_ptr() for tensor in kept] == [x.data_ptr(), bias.data_ptr()]


@KINDS
def test_the_order_of_a_blocks_threads_does_not_matter(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = tensors(kind, (40, 2056), torch.float32)
    first, second = in_both_orders(lambda: results(lambda *args: native(kind, *args), *arguments), monkeypatch)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_threads_do_not_change_a_bit(cpu_kernels: None, kind: str, dtype: torch.dtype) -> None:
    arguments = tensors(kind, (333, 130), dtype)
    alone, *others = with_threads(lambda: results(lambda *args: native(kind, *args), *arguments))
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(alone, other, strict=True))


@KINDS
@pytest.mark.parametrize("size", [64, 130])
def test_a_row_does_not_depend_on_the_others(kernels: str, kind: str, size: int) -> None:
    x, bias, dy = tensors(kind, (70, size), torch.float32)
    whole = results(lambda *args: native(kind, *args), x, bias, dy)[:2]
    alone = results(lambda *args: native(kind, *args), x[37:38], bias, dy[37:38])[:2]
    assert all(torch.equal(a[37:38], b) for a, b in zip(whole, alone, strict=True))


@KINDS
@BIAS
def test_the_reference_is_the_definition(kind: str, with_bias: bool) -> None:
    arguments = tensors(kind, (4, 9), torch.float64, with_bias)
    found = results(lambda x, bias=None: bias_activation(x, bias, kind, backend="reference"), *arguments)
    assert_near(found, results(lambda *args: definition(kind, *args), *arguments), BOUND[torch.float64])


def test_both_sides_have_the_same_numbers() -> None:
    header = (libraries.CSRC / "common" / "activation.h").read_text()
    listed = header.split("enum Activation : int64_t {")[1].split("}")[0].split(",")
    found = [(name.strip(), int(number)) for name, number in (entry.split("=") for entry in listed)]
    assert [(name.lower(), number) for name, number in found] == [(k.replace("_", ""), n) for k, n in NUMBERS.items()]


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_wrong_arguments_are_named(cpu_kernels: None, backend: str) -> None:
    x, bias = draw((3, 7), torch.float32), draw((7,), torch.float32)
    with pytest.raises(ConfigError, match=r"bias is \[6\]; for x \[3, 7\] it must be \[7\]"):
        bias_activation(x, bias[:6], "gelu", backend=backend)
    with pytest.raises(ConfigError, match=r"bias is torch.float64 on cpu and x torch.float32 on cpu"):
        bias_activation(x, bias.double(), "gelu", backend=backend)
    with pytest.raises(ConfigError, match=r"x is \[3, 7\]; its last dim is the gate and the value of swiglu.* even"):
        bias_activation(x, bias, "swiglu", backend=backend)
    with pytest.raises(ConfigError, match=r"x is \[3, 0\]; its last dim must not be empty"):
        bias_activation(torch.empty(3, 0), None, "gelu", backend=backend)
    with pytest.raises(ConfigError, match=r"kind='elu'; legal: gelu, gelu_tanh, squared_relu, swiglu, geglu"):
        bias_activation(x, bias, "elu", backend=backend)


@pytest.mark.parametrize("no_bias", [False, True], ids=["bias", "no bias"])
@pytest.mark.parametrize("flag", [None, "openai_gelu", "squared_relu", "relu", "swiglu", "geglu"])
def test_a_models_loss_and_gradients_are_those_of_the_reference(
    cpu_kernels: None, flag: str | None, no_bias: bool
) -> None:  # C52
    settings = {"fp64": True, "disable_bias_linear": no_bias, **({flag: True} if flag else {})}
    losses, gradients = [], []
    for backend in ("native", "reference"):
        (model,) = tiny_run(kernel_backend=backend, **settings).stages.values()
        loss = model(torch.arange(8).reshape(1, 8)).square().sum()
        loss.backward()
        losses.append(loss)
        found = {n: p.grad if p.grad is not None else p.main_grad for n, p in model.named_parameters()}
        gradients.append(found)
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-12, atol=0)
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-9, atol=1e-9 * gradient.abs().max().item())
        assert gradient.abs().sum() > 0 or "mlp" not in name, name


@pytest.mark.parametrize("with_bias", [False, True])
def test_xielu_is_that_of_transformers(with_bias: bool) -> None:
    """In float64, with gradients; only the arguments are saved for backward."""
    from transformers.activations import XIELUActivation

    theirs, x = XIELUActivation(dtype=torch.float64), draw((5, 7), torch.float64).requires_grad_()
    bias = draw((7,), torch.float64).requires_grad_() if with_bias else None
    numbers = [torch.tensor([value], dtype=torch.float64, requires_grad=True) for value in (0.3, -0.7)]
    with torch.no_grad():
        for own, number in zip((theirs.alpha_p, theirs.alpha_n), numbers, strict=True):
            own.copy_(number)
    wanted = theirs(x if bias is None else x + bias)
    found = xielu(x, bias, *numbers)
    torch.testing.assert_close(found, wanted, rtol=1e-14, atol=1e-14)
    weights, inputs = draw((5, 7), torch.float64), [x, *([] if bias is None else [bias])]
    ours = torch.autograd.grad((found * weights).sum(), [*inputs, *numbers])
    expected = torch.autograd.grad((wanted * weights).sum(), [*inputs, theirs.alpha_p, theirs.alpha_n])
    for own, their in zip(ours, expected, strict=True):
        torch.testing.assert_close(own, their, rtol=1e-13, atol=1e-13)
