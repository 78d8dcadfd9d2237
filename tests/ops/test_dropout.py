"""Bias, dropout and residual: both native kernels against the definition in float64, with bitwise equal masks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_core.errors import ConfigError
from megatron_core.ops import bias_dropout_add
from megatron_core.ops.reference import dropout_scale, dropout_threshold, keep, philox
from megatron_core.parallel.micro_batch import SequenceDetails
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

KEY = 0x299F31D0A4093822
P = 5 / 16  # a multiple of 2^-16


def samples(x: Tensor) -> Tensor:
    """Numbers some of which need more than 32 bits."""
    batch = x.shape[1 if x.dim() == 3 else 0]
    return 3 + torch.arange(batch, dtype=torch.int64) * (2**32 + 1)


def positions(x: Tensor, first: int = 5) -> Tensor:
    """Positions of consecutive rows that do not start at 0."""
    return first + torch.arange(x.shape[0 if x.dim() == 3 else 2])


def masked(x: Tensor, p: float = P) -> Tensor:
    """The mask of ``x``, divided by the expected share of kept elements."""
    kept = keep(tuple(x.shape), p, KEY, samples(x), positions(x), None, 2 if x.dim() == 4 else 0)
    return kept.double() / (1 - p)


def native(x: Tensor, bias: Tensor | None, residual: Tensor | None, p: float = P, backend: str = "native") -> Tensor:
    first_head = 2 if x.dim() == 4 else 0
    numbers = samples(x), positions(x), None, first_head
    return bias_dropout_add(x, bias, residual, p, KEY, *numbers, backend=backend)


def results(x: Tensor, bias: Tensor | None, residual: Tensor | None, dy: Tensor, p: float = P) -> list[Tensor]:
    """Output and all gradients."""
    leaves = [None if tensor is None else tensor.detach().requires_grad_() for tensor in (x, bias, residual)]
    y = native(*leaves, p)
    return [y, *torch.autograd.grad(y, [leaf for leaf in leaves if leaf is not None], dy)]


def check(x: Tensor, bias: Tensor | None, residual: Tensor | None, dy: Tensor, p: float = P) -> None:
    mask, grad = masked(x, p), dy.double()
    y = mask * (x.double() + (0 if bias is None else bias.double())) + (0 if residual is None else residual.double())
    expected = [y, mask * grad]
    expected += [] if bias is None else [(mask * grad).flatten(0, -2).sum(0)]
    expected += [] if residual is None else [grad]
    found = results(x, bias, residual, dy, p)
    assert all(tensor.dtype == x.dtype for tensor in found)
    assert_near(found, expected, BOUND[x.dtype], slack=1e-30)


SHAPES = [
    (1, 1, 1),
    (5, 2, 7),
    (3, 2, 64),
    (70, 2, 130),
    (2, 3, 2, 33),
    (3, 2, 5, 40),
    (2, 1, 4096),
    (2, 1, 16391),
    (0, 2, 8),
]


# The vectors that Salmon et al. publish with their library: counter, key, words.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_known_answers(counter: str, key: str, words: str) -> None:
    low, high = (int(word, 16) for word in key.split())
    drawn = philox(tuple(torch.tensor(int(word, 16)) for word in counter.split()), high << 32 | low)
    assert [word.item() for word in drawn] == [int(word, 16) for word in words.split()]


def test_the_counter_is_the_one_that_is_written_down() -> None:
    """The third of the known answers as an element of attention weights: position, sample, head and channel."""
    c, position, low, rest = 0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344
    four = philox(tuple(torch.tensor(n) for n in (c, position, low, rest)), KEY)
    assert four[0].item() == 0xD16CFE09
    sample, head = low + ((rest & 0xFFFF) << 32), rest >> 16
    drawn = keep((1, 1, 1, 16), 0.5, KEY, torch.tensor([sample]), torch.tensor([position]), None, head)
    expected = [word.item() for word in philox(tuple(torch.tensor(n) for n in (1, position, low, rest)), KEY)]
    assert drawn[0, 0, 0, 8:].tolist() == [half >= 2**15 for word in expected for half in (word & 0xFFFF, word >> 16)]


def test_kernels_draw_the_same_bits(kernels: str) -> None:
    """Also with large numbers of positions, samples, heads and channels."""
    number = torch.tensor([0, 2**31, 2**32 - 1, 2**40 + 7, 2**48 - 1])
    ones = torch.ones(5, 3, 4, 203)
    for p in (0.1, 0.5, 0.999):
        for first, head in ((0, 0), (2**31 - 2, 300), (2**32 - 4, 2**16 - 3)):
            numbers = number, positions(ones, first), None, head
            y = bias_dropout_add(ones, None, None, p, KEY, *numbers, backend="native")
            assert torch.equal(y != 0, keep(tuple(ones.shape), p, KEY, *numbers))


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_output_and_gradients_are_those_of_the_definition(
    kernels: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:  # C55
    x, residual, dy = (draw(shape, dtype, seed) for seed in range(3))
    bias = draw(shape[-1:], dtype, 3)
    check(x, bias, residual, dy)
    check(x, None, residual, dy)
    check(x, bias, None, dy)
    check(x, None, None, dy)


@ANY
@given(
    shape=st.lists(st.integers(1, 7), min_size=2, max_size=3),
    size=st.integers(1, 300),
    dtype=st.sampled_from(LOW),
    p=st.sampled_from([0.0, 0.125, 0.875]),
)
def test_any_shape(kernels: str, shape: list[int], size: int, dtype: torch.dtype, p: float) -> None:
    x, residual, dy = (draw((*shape, size), dtype, seed) for seed in range(3))
    check(x, draw((size,), dtype, 3), residual, dy, p)


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_tensors_need_not_be_contiguous(kernels: str, dtype: torch.dtype) -> None:  # C22, C55
    x, residual, dy = (draw((4, 6, 32), dtype, seed) for seed in range(3))
    bias = draw((64,), dtype, 3)[::2]
    for (name, a), (_, b), (_, c) in zip(views(x), views(residual), views(dy), strict=True):
        assert not a.is_contiguous() and torch.equal(a, x), name
        for case in (
            (a, residual, dy),
            (x, b, dy),
            (x, residual, c),
            (a, b, c),
            (x, residual, dy[:1, :1].expand_as(x)),
        ):
            check(case[0], bias, *case[1:])
    weights = draw((2, 6, 3, 32), dtype).permute(0, 2, 1, 3)
    check(weights, None, None, draw((2, 3, 32, 6), dtype, 1).transpose(2, 3))


@pytest.mark.parametrize("p", [0.0, 0.1875])
@pytest.mark.parametrize("shape", [(3, 2, 3), (2, 1, 9), (2, 1, 2, 3)], ids=str)
def test_gradcheck(cpu_kernels: None, shape: tuple[int, ...], p: float) -> None:  # C52 C55
    x, residual = (draw(shape, torch.float64, seed).requires_grad_() for seed in range(2))
    bias = draw(shape[-1:], torch.float64, 2).requires_grad_()
    strided = x.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    for first in (x, strided):
        assert torch.autograd.gradcheck(lambda *tensors: native(*tensors, p), (first, bias, residual))
    assert torch.autograd.gradcheck(lambda x: native(x, None, None, p), x)


@AS_BUILT
def test_opcheck(kernels: str) -> None:
    x, residual = (draw((3, 4, 24), torch.float32, seed).requires_grad_() for seed in range(2))
    bias, ops = draw((24,), torch.float32, 2).requires_grad_(), torch.ops.megatron_core
    for tensors in ((x, bias, residual), (x.transpose(0, 1), None, None), (x, bias, None)):
        torch.library.opcheck(
            ops.bias_dropout_add, (*tensors, P, KEY, samples(tensors[0]), positions(tensors[0]), None, 0)
        )
    torch.library.opcheck(ops.bias_dropout_add, (x, bias, residual, 0.0, KEY, None, None, None, 0))
    numbers = samples(x), positions(x), None, 0
    _, kept = ops.bias_dropout_add(x.detach(), None, None, P, KEY, *numbers)
    for sums in (False, True):
        torch.library.opcheck(ops.bias_dropout_add_backward, (x.detach(), P, KEY, *numbers, kept, sums))
    weights = draw((2, 3, 4, 24), torch.float32).requires_grad_()
    numbers = samples(weights), positions(weights), torch.arange(24).flip(0), 1
    torch.library.opcheck(ops.bias_dropout_add, (weights, None, None, P, KEY, *numbers))


def test_every_element_is_written(kernels: str) -> None:
    with poisoned_memory():
        for shape in SHAPES:
            x, residual, dy = (draw(shape, torch.float32, seed) for seed in range(3))
            check(x, draw(shape[-1:], torch.float32, 3), residual, dy)


@pytest.mark.parametrize("p", [0.0, P])
def test_torch_compile_gives_the_same(cpu_kernels: None, p: float) -> None:
    x, residual = (draw((6, 2, 40), torch.float32, seed) for seed in range(2))
    bias, number = draw((40,), torch.float32, 2), samples(x)

    def function(x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
        return bias_dropout_add(x * 2, bias, residual, p, KEY, number, backend="native") + 1

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    found = []
    for each in (compiled, function):
        leaves = [tensor.clone().requires_grad_() for tensor in (x, bias, residual)]
        y = each(*leaves)
        found.append([y, *torch.autograd.grad(y, leaves, draw(x.shape, x.dtype, 3))])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_compiled_function_takes_any_length(cpu_kernels: None) -> None:
    """The size of the saved mask depends on the shape, but must not make constants of dynamic sizes."""

    def function(x: Tensor, number: Tensor) -> Tensor:
        return bias_dropout_add(x, None, None, P, KEY, number, backend="native")

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    for sizes, may_compile in (((6, 2, 40), True), ((9, 4, 300), False)):
        x = draw(sizes, torch.float32).requires_grad_()
        with torch._dynamo.config.patch(error_on_recompile=not may_compile):
            y = compiled(x, samples(x))
        assert torch.equal(y, function(x, samples(x)))
        y.sum().backward()


def test_gradients_go_where_they_are_wanted(kernels: str) -> None:
    x, residual, dy = (draw((5, 2, 24), torch.float32, seed) for seed in range(3))
    bias = draw((24,), torch.float32, 3)
    whole = results(x, bias, residual, dy)[1:]
    for wanted in range(3):
        leaves = [tensor.clone() for tensor in (x, bias, residual)]
        leaves[wanted].requires_grad_()
        (alone,) = torch.autograd.grad(native(*leaves), leaves[wanted], dy)
        assert torch.equal(alone, whole[wanted])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_threads_do_not_change_a_bit(cpu_kernels: None, dtype: torch.dtype) -> None:
    x, residual, dy = (draw((111, 3, 130), dtype, seed) for seed in range(3))
    alone, *others = with_threads(lambda: results(x, draw((130,), dtype, 3), residual, dy))
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(alone, other, strict=True))


def test_the_order_of_a_blocks_threads_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    x, residual, dy = (draw((20, 2, 4096), torch.bfloat16, seed) for seed in range(3))
    bias = draw((4096,), torch.bfloat16, 3)
    first, second = in_both_orders(lambda: results(x, bias, residual, dy), monkeypatch)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_parts_are_parts_of_the_whole(kernels: str, backend: str) -> None:  # C26 C27
    """Single positions, samples and heads have the same mask as within the whole."""
    x, number = draw((6, 4, 50), torch.float32), torch.tensor([7, 2**35, 1, 3])
    whole = bias_dropout_add(x, None, None, P, KEY, number, backend=backend)
    part = bias_dropout_add(x[2:5, 1:3], None, None, P, KEY, number[1:3], torch.arange(2, 5), backend=backend)
    assert torch.equal(part, whole[2:5, 1:3])
    x = draw((4, 6, 3, 50), torch.float32)
    whole = bias_dropout_add(x, None, None, P, KEY, number, backend=backend)
    part = bias_dropout_add(x[1:3, 4:], None, None, P, KEY, number[1:3], first_head=4, backend=backend)
    assert torch.equal(part, whole[1:3, 4:])


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("channels", [1, 13, 64, 403])
def test_rows_and_keys_may_be_at_any_positions(kernels: str, backend: str, channels: int) -> None:  # C26 C27
    """Output and gradient are rows and columns of those of the whole sequence, also with different positions per
    sequence."""
    number = torch.tensor([7, 2**35, 1])

    def both(x: Tensor, *numbers: Tensor | int | None) -> tuple[Tensor, Tensor]:
        y = bias_dropout_add(x.requires_grad_(), None, None, P, KEY, number, *numbers, backend=backend)
        return y.detach(), *torch.autograd.grad(y.sum(), x)

    generator = torch.Generator().manual_seed(channels)
    orders = torch.stack([torch.randperm(11, generator=generator, device="cpu")[:7] for _ in range(3)])
    orders, samples = orders.to(number.device), torch.arange(3)
    x = draw((11, 3, channels), torch.float32)
    whole = both(x)
    for mine, right in zip(both(x.detach()[orders[0]], orders[0]), whole, strict=True):
        assert torch.equal(mine, right[orders[0]])
    for mine, right in zip(both(x.detach()[orders.T, samples], orders), whole, strict=True):
        assert torch.equal(mine, right[orders.T, samples])
    weights = draw((3, 2, 11, channels), torch.float32)
    half = channels // 2 // 8 * 8  # a run that is drawn at once, and others
    keys = torch.cat([torch.arange(half, channels), torch.arange(half).flip(0)[::2]])
    whole = both(weights)
    for of in (orders[0], orders):
        shared = of.broadcast_to(3, 7)
        at = samples[:, None, None, None], torch.arange(2)[:, None, None], shared[:, None, :, None], keys
        for mine, right in zip(both(weights.detach()[at], of, keys), whole, strict=True):
            assert torch.equal(mine, right[at])


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_extreme_values(kernels: str, backend: str) -> None:
    """Dropped elements have no effect even if infinite or NaN; kept ones stay infinite or NaN."""
    for dtype in (torch.float16, torch.bfloat16):
        x = torch.tensor([6e-8, -3e-6, 5e-5, torch.inf, -torch.inf, torch.nan, 1.0]).repeat(8, 4, 9).to(dtype)
        residual = torch.ones_like(x)
        kept = masked(x) > 0
        y = native(x, None, residual, backend=backend)
        assert torch.equal(y[~kept], residual[~kept])
        expected = (x.float() / (1 - P) + 1).to(dtype)
        torch.testing.assert_close(y[kept], expected[kept], equal_nan=True)


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_wrong_arguments_are_named(cpu_kernels: None, backend: str) -> None:
    x, number = torch.randn(3, 2, 8), torch.tensor([1, 2])

    def call(x: Tensor, bias: Tensor | None = None, residual: Tensor | None = None, p: float = P, number=number):
        return bias_dropout_add(x, bias, residual, p, KEY, number, backend=backend)

    for p in (-0.1, 1.0, float("nan")):
        with pytest.raises(ConfigError, match=r"dropout: p=.*>= 0 and < 1"):
            call(x, p=p)
    with pytest.raises(ConfigError, match=r"x is \[2, 8\]; it must be \[s, b, h\]"):
        call(x[0])
    with pytest.raises(ConfigError, match=r"bias is \[7\]; for x \[3, 2, 8\] it must be \[8\]"):
        call(x, bias=torch.randn(7))
    with pytest.raises(ConfigError, match=r"residual is torch.float64 on cpu and x torch.float32"):
        call(x, residual=x.double())
    with pytest.raises(ConfigError, match="needs sample_index"):
        call(x, number=None)
    for wrong in (number[:1], number.int()):
        with pytest.raises(ConfigError, match=r"sample_index is.*it must be \[2\] of torch.int64"):
            call(x, number=wrong)
    for wrong, shape in ((number, r"\[3\]"), (number[None], r"\[2, 3\]"), (torch.zeros(3), r"\[3\]")):
        with pytest.raises(ConfigError, match=rf"position_ids is.*it must be {shape} of torch.int64"):
            bias_dropout_add(x, None, None, P, KEY, number, wrong, backend=backend)
    with pytest.raises(ConfigError, match=r"key_positions is.*it must be \[8\] of torch.int64"):
        bias_dropout_add(x[None], None, None, P, KEY, number[:1], None, number, backend=backend)
    with pytest.raises(ConfigError, match="key_positions are for attention weights"):
        bias_dropout_add(x, None, None, P, KEY, number, None, torch.arange(8), backend=backend)
    assert torch.equal(call(x, p=0.0, number=None), x)


def test_the_reference_is_the_definition() -> None:
    for shape in SHAPES:
        x, residual = (draw(shape, torch.float64, seed) for seed in range(2))
        bias = draw(shape[-1:], torch.float64, 2)
        found = native(x, bias, residual, backend="reference")
        torch.testing.assert_close(found, residual + masked(x) * (x + bias))


def test_probabilities_are_multiples_of_two_to_the_minus_16() -> None:
    assert (dropout_threshold(0.5), dropout_threshold(0.1), dropout_scale(0.1)) == (2**15, 6554, 2**16 / (2**16 - 6554))
    assert (dropout_threshold(1e-12), dropout_scale(1e-12)) == (0, 1)
    assert (dropout_threshold(1 - 1e-12), dropout_scale(1 - 1e-12)) == (2**16 - 1, 2**16)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_a_model_computes_the_same_with_either_backend(cpu_kernels: None, dropout: float) -> None:  # C52
    """Every bias gets its gradient, also biases fused into the addition."""
    found = []
    for backend in ("native", "reference"):
        run = tiny_run(fp64=True, hidden_dropout=dropout, attention_dropout=dropout, kernel_backend=backend)
        (model,) = run.stages.values()
        logits = model(
            torch.arange(32).reshape(2, 16), sequences=SequenceDetails(sample_index=torch.tensor([5, 2**33]))
        )
        logits.square().sum().backward()
        gradients = {name: p.main_grad if p.grad is None else p.grad for name, p in model.named_parameters()}
        assert all(gradients[name].abs().sum() > 0 for name in gradients if name.endswith(("proj.bias", "fc2.bias")))
        found.append({"logits": logits, **gradients})
    native, plain = found
    for name, tensor in native.items():
        torch.testing.assert_close(tensor, plain[name], rtol=1e-10, atol=1e-11)


def test_at_most_a_bit_of_an_element_is_kept_for_backward(kernels: str) -> None:
    """On a CPU; a GPU saves only the sample numbers."""
    x, number = draw((64, 2, 512), torch.float32).requires_grad_(), torch.tensor([1, 2])
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        bias_dropout_add(x, draw((512,), x.dtype), x, P, KEY, number, backend="native")
    assert sum(tensor.nbytes for tensor in kept) == number.nbytes + (x.numel() // 8 if kernels == "cpu" else 0)
