"""Rotary positions: both native kernels against the definition in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_core.errors import ConfigError
from megatron_core.ops import reference
from megatron_core.ops.rotary import rope
from tests.ops.checks import ANY, AS_BUILT, BOUND, LOW, assert_near, draw, in_both_orders, poisoned_memory, with_threads
from tests.runs import tiny_run

PAIRINGS = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "neighbours"])


def definition(x: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """Each pair of channels is a complex number, multiplied by e^(i angle)."""
    count = angles.shape[-1]
    for _ in range(x.dim() - angles.dim()):
        angles = angles.unsqueeze(-2)
    turned, passed = x[..., : 2 * count], x[..., 2 * count :]
    pairs = turned.unflatten(-1, (count, 2) if interleaved else (2, count))
    pairs = pairs if interleaved else pairs.transpose(-1, -2)
    numbers = torch.complex(pairs[..., 0], pairs[..., 1]) * torch.polar(torch.ones_like(angles), angles)
    turned = torch.view_as_real(numbers)
    return torch.cat([(turned if interleaved else turned.transpose(-1, -2)).flatten(-2), passed], -1)


def tables(angles: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return angles.cos().to(wide), angles.sin().to(wide)


def results(x: Tensor, angles: Tensor, dy: Tensor, interleaved: bool, backend: str = "native") -> list[Tensor]:
    x = x.detach().requires_grad_()
    y = rope(x, *tables(angles, x.dtype), interleaved=interleaved, backend=backend)
    return [y, *torch.autograd.grad(y, x, dy)]


def check(x: Tensor, angles: Tensor, dy: Tensor, interleaved: bool) -> None:
    """Backward is the rotation by the negative angles."""
    found = results(x, angles, dy, interleaved)
    expected = [definition(x.double(), angles, interleaved), definition(dy.double(), -angles, interleaved)]
    assert all(tensor.dtype == x.dtype and tensor.is_contiguous() for tensor in found)
    assert_near(found, expected, BOUND[x.dtype])


def angles_of(*shape: int) -> Tensor:
    return 3 * draw(shape, torch.float64, 9)


# Shapes of x and the tables: whole heads and parts of them, common and separate positions, no, one and two dims of
# heads.
SHAPES = [
    ((5, 2, 3, 8), (5, 2, 4)),
    ((5, 2, 3, 8), (5, 1, 2)),
    ((7, 2, 128), (7, 2, 64)),
    ((3, 2, 4, 3, 64), (3, 1, 16)),
    ((9, 2, 5, 33), (1, 2, 7)),
    ((6, 3, 130), (6, 65)),
    ((6, 16), (6, 5)),
    ((2, 1, 2, 2048), (2, 1, 1024)),
    ((40, 3, 12, 64), (40, 3, 32)),
    ((0, 2, 3, 8), (0, 1, 4)),
]


@PAIRINGS
@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize(("shape", "table"), SHAPES, ids=str)
def test_output_and_gradient_are_those_of_the_definition(
    kernels: str, interleaved: bool, dtype: torch.dtype, shape: tuple[int, ...], table: tuple[int, ...]
) -> None:  # C55
    check(draw(shape, dtype), angles_of(*table), draw(shape, dtype, 1), interleaved)


@PAIRINGS
@ANY
@given(
    places=st.lists(st.integers(1, 4), min_size=1, max_size=2),
    heads=st.lists(st.integers(1, 4), max_size=2),
    pairs=st.integers(1, 80),
    passing=st.integers(0, 40),
    dtype=st.sampled_from(LOW),
)
def test_any_shape(
    kernels: str,
    interleaved: bool,
    places: list[int],
    heads: list[int],
    pairs: int,
    passing: int,
    dtype: torch.dtype,
) -> None:
    shape = (*places, *heads, 2 * pairs + passing)
    check(draw(shape, dtype), angles_of(*places, pairs), draw(shape, dtype, 1), interleaved)


@PAIRINGS
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_inputs_and_gradients_need_not_be_contiguous(
    kernels: str, interleaved: bool, dtype: torch.dtype
) -> None:  # C22
    """Query and key of one projection, sequence first, every second channel, and an expanded gradient."""
    mixed, angles = draw((5, 2, 3, 6, 16), dtype), angles_of(5, 2, 8)
    query, key, _ = mixed.split([4, 1, 1], dim=-2)
    for x in (query, key.squeeze(-2), mixed[..., ::2], mixed.transpose(0, 1).contiguous().transpose(0, 1)):
        for dy in (draw((*x.shape, 2), dtype, 1)[..., 0], x.new_ones(()).expand_as(x)):
            check(x, angles[..., : x.shape[-1] // 2], dy, interleaved)


@PAIRINGS
def test_tables_need_not_be_contiguous(kernels: str, interleaved: bool) -> None:
    x, angles = draw((5, 2, 3, 16), torch.float32), angles_of(2, 5, 8).transpose(0, 1)
    check(x, angles, draw(x.shape, x.dtype, 1), interleaved)
    check(x, angles[:, :1].expand(5, 2, 8), draw(x.shape, x.dtype, 1), interleaved)


def test_a_projection_is_read_where_it_lies(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither query nor key of a fused projection is copied, with several heads per group."""
    mixed, angles = draw((5, 2, 3, 6, 16), torch.float32), tables(angles_of(5, 1, 8), torch.float32)
    parts = (mixed[..., :4, :], mixed[..., 4, :])
    expected = [rope(part, *angles, backend="reference") for part in parts]
    monkeypatch.setattr(Tensor, "contiguous", lambda self: self if self.is_contiguous() else pytest.fail("a copy"))
    for part, right in zip(parts, expected, strict=True):
        torch.testing.assert_close(rope(part, *angles, backend="native"), right)


@pytest.mark.drawn(3)
@PAIRINGS
@pytest.mark.parametrize(
    ("shape", "table"),
    [((3, 5), (3, 2)), ((2, 1, 22), (2, 1, 11)), ((3, 2, 2, 4), (3, 1, 1)), ((2, 1, 2, 2, 4), (1, 1, 2))],
    ids=str,
)
def test_gradcheck(
    cpu_kernels: None, interleaved: bool, shape: tuple[int, ...], table: tuple[int, ...]
) -> None:  # C52 C55
    x = draw(shape, torch.float64).requires_grad_()
    cos, sin = tables(angles_of(*table), x.dtype)

    def function(x: Tensor) -> Tensor:
        return rope(x, cos, sin, interleaved=interleaved, backend="native")

    assert torch.autograd.gradcheck(function, x)
    assert torch.autograd.gradgradcheck(function, x)


@AS_BUILT
@PAIRINGS
def test_opcheck(kernels: str, interleaved: bool) -> None:
    x = draw((4, 3, 2, 24), torch.float32).requires_grad_()
    for table in ((4, 1, 12), (4, 3, 8)):
        for view in (x, x.transpose(1, 2)) if table[1] == 1 else (x,):
            for inverse in (False, True):
                inputs = (view, *tables(angles_of(*table), x.dtype), interleaved, inverse)
                torch.library.opcheck(torch.ops.megatron_core.rope, inputs)


@PAIRINGS
def test_every_element_is_written(kernels: str, interleaved: bool) -> None:
    with poisoned_memory():
        for shape, table in SHAPES:
            check(draw(shape, torch.float32), angles_of(*table), draw(shape, torch.float32, 1), interleaved)


@PAIRINGS
def test_threads_do_not_change_a_bit(cpu_kernels: None, interleaved: bool) -> None:
    x, angles = draw((33, 3, 2, 40), torch.bfloat16), angles_of(33, 3, 17)
    alone, *others = with_threads(lambda: results(x, angles, x, interleaved))
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(alone, other, strict=True))


@PAIRINGS
def test_the_order_of_a_blocks_threads_does_not_matter(interleaved: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x, angles = draw((3, 2, 20, 72), torch.bfloat16), angles_of(3, 2, 32)
    first, second = in_both_orders(lambda: results(x, angles, x, interleaved), monkeypatch)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@PAIRINGS
def test_torch_compile_gives_the_same(cpu_kernels: None, interleaved: bool) -> None:
    x, (cos, sin) = draw((6, 2, 3, 40), torch.float32), tables(angles_of(6, 1, 16), torch.float32)

    def function(x: Tensor) -> Tensor:
        return rope(x * 2, cos, sin, interleaved=interleaved, backend="native") + 1

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    gradients = []
    for each in (compiled, function):
        leaf = x.clone().requires_grad_()
        y = each(leaf)
        gradients.append([y, *torch.autograd.grad(y, leaf, draw(x.shape, x.dtype, 1))])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@PAIRINGS
def test_the_reference_is_the_definition(interleaved: bool) -> None:
    for shape, table in SHAPES:
        x, angles = draw(shape, torch.float64), angles_of(*table)
        found = reference.rope(x, angles.cos(), angles.sin(), interleaved)
        torch.testing.assert_close(found, definition(x, angles, interleaved), rtol=0, atol=1e-13)


@PAIRINGS
def test_lengths_of_pairs_stay_in_low_precision(kernels: str, interleaved: bool) -> None:
    """At any position: bfloat16 tables would change them by up to 0.4 %, ten times the allowed error of one
    rounding."""
    x, angles = torch.ones(64, 1, 1, 32, dtype=torch.bfloat16), angles_of(64, 1, 16) * 1e5
    y = rope(x, *tables(angles, x.dtype), interleaved=interleaved, backend="native").double()
    pairs = y.unflatten(-1, (16, 2) if interleaved else (2, 16))
    lengths = pairs.square().sum(-1 if interleaved else -2).sqrt()
    torch.testing.assert_close(lengths, torch.full_like(lengths, 2**0.5), rtol=2**-8, atol=0)
    assert abs(lengths.mean().item() / 2**0.5 - 1) < 3e-4


@PAIRINGS
def test_extreme_values(kernels: str, interleaved: bool) -> None:
    """Other channels are unchanged bitwise; infinities and NaN affect only their own pair."""
    x = torch.zeros(1, 1, 1, 12, dtype=torch.float16)
    x[..., 4:10] = torch.tensor([6e-8, -3e-6, 65504.0, torch.inf, -torch.inf, torch.nan])
    for first, count in ((0, 2), (4, 4)):
        own = x[..., first:]
        y = rope(own, *tables(angles_of(1, 1, count), x.dtype), interleaved=interleaved, backend="native")
        assert torch.equal(y[..., 2 * count :].view(torch.int16), own[..., 2 * count :].view(torch.int16))
        expected = reference.rope(own, *tables(angles_of(1, 1, count), x.dtype), interleaved)
        torch.testing.assert_close(y, expected, equal_nan=True)


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_wrong_arguments_are_named(cpu_kernels: None, backend: str) -> None:
    x, (cos, sin) = torch.randn(5, 2, 3, 8), tables(torch.randn(5, 1, 4), torch.float32)
    with pytest.raises(ConfigError, match=r"x is \[8\], cos \[5, 1, 4\].*x must be \[s, b, heads, d\]"):
        rope(x[0, 0, 0], cos, sin, backend=backend)
    for wrong in ((cos[:3], sin[:3]), (cos, sin[..., :3]), (torch.randn(5, 1, 5),) * 2, (cos[..., :0], sin[..., :0])):
        with pytest.raises(ConfigError, match="tables must have the same shape"):
            rope(x, *wrong, backend=backend)
    with pytest.raises(ConfigError, match=r"cos is torch.bfloat16 on cpu; for x, which is torch.bfloat16.*float32"):
        rope(x.bfloat16(), cos.bfloat16(), sin.bfloat16(), backend=backend)


def test_tables_that_want_a_gradient_are_refused(cpu_kernels: None) -> None:  # C52
    cos, sin = tables(torch.randn(5, 1, 4), torch.float32)
    with pytest.raises(NotImplementedError, match="backend='reference' does"):
        rope(torch.randn(5, 2, 3, 8), cos.requires_grad_(), sin, backend="native")


@pytest.mark.parametrize("groups", [4, 2])
def test_a_model_computes_the_same_with_either_backend(cpu_kernels: None, groups: int) -> None:
    found = []
    for backend in ("native", "reference"):
        grouped = {"group_query_attention": True, "num_query_groups": groups} if groups < 4 else {}
        rotary = {"position_embedding_type": "rope", "rotary_percent": 0.5}
        run = tiny_run(fp64=True, kernel_backend=backend, **rotary, **grouped)
        (model,) = run.stages.values()
        logits = model(torch.arange(32).reshape(2, 16))
        logits.square().sum().backward()
        found.append([logits, *(p.main_grad if p.grad is None else p.grad for p in model.parameters())])
    for native, plain in zip(*found, strict=True):
        torch.testing.assert_close(native, plain, rtol=1e-11, atol=1e-12)
