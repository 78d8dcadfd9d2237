"""squared_norm, scale_ and adamw_: both native kernels against the definitions in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_core.errors import ConfigError
from megatron_core.ops import adamw_, reference, scale_, squared_norm
from tests.ops.checks import ANY, AS_BUILT, LOW, draw, in_both_orders, poisoned_memory, with_threads

DTYPES = pytest.mark.parametrize("dtype", LOW, ids=str)
SIZES = [1, 0, 7, 1030, 16391]  # one element to more than a chunk
MANY = [3] * 150  # more than two tables
RATES = {"lr": 0.01, "betas": (0.8, 0.95), "epsilon": 1e-6, "weight_decay": 0.1}
SOME_SIZES = st.lists(st.integers(0, 40), max_size=5)


@dataclass
class Flat:
    """Tensors in one buffer, each preceded by one number, so that most are not aligned to 16 bytes."""

    sizes: Sequence[int]
    dtype: torch.dtype
    seed: int = 0
    tensors: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.buffer = draw((sum(self.sizes) + len(self.sizes),), self.dtype, self.seed)
        self.between = torch.ones_like(self.buffer, dtype=torch.bool)
        self.tensors, at = [], 0
        for size in self.sizes:
            self.tensors.append(self.buffer[at + 1 : at + 1 + size])
            self.between[at + 1 : at + 1 + size] = False
            at += 1 + size
        self.neighbours = self.buffer[self.between].clone()

    def assert_neighbours_kept(self) -> None:
        assert torch.equal(self.buffer[self.between], self.neighbours)


def exact_sum(tensors: list[Tensor]) -> float:
    """The sum of squares, rounded once: squares of all numbers narrower than float64 are exact."""
    return math.fsum(x * x for tensor in tensors for x in tensor.double().flatten().tolist())


@DTYPES
@pytest.mark.parametrize("sizes", [SIZES, MANY, [0]], ids=["some", "many", "empty"])
def test_the_sum_of_squares_is_accurate_to_float64(kernels: str, dtype: torch.dtype, sizes: list[int]) -> None:
    tensors = Flat(sizes, dtype).tensors
    found = squared_norm(tensors, backend="native")
    assert (found.shape, found.dtype) == ((), torch.float64)
    assert found.item() == pytest.approx(exact_sum(tensors), rel=1e-14)


@ANY
@given(sizes=SOME_SIZES, dtype=st.sampled_from(LOW))
def test_any_sizes(kernels: str, sizes: list[int], dtype: torch.dtype) -> None:
    parts = Flat(sizes, dtype)
    assert squared_norm(parts.tensors, backend="native").item() == pytest.approx(exact_sum(parts.tensors), rel=1e-14)
    expected = [reference_scaled(x, 0.3) for x in parts.tensors]
    scale_(parts.tensors, 0.3, backend="native")
    assert all(map(torch.equal, parts.tensors, expected))
    parts.assert_neighbours_kept()


def reference_scaled(x: Tensor, factor: float) -> Tensor:
    y = x.clone()
    reference.scale_([y], factor)
    return y


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_number_that_is_not_finite_shows(kernels: str, dtype: torch.dtype, value: float) -> None:  # C64
    for offset in (0, 5000, 16390):
        tensors = Flat(SIZES, dtype).tensors
        tensors[-1][offset] = value
        found = squared_norm(tensors, backend="native").item()
        assert math.isnan(found) if math.isnan(value) else found == math.inf


@pytest.mark.parametrize("size", [1e-40, 1e30])
def test_squares_beyond_float32_are_finite_and_count(kernels: str, size: float) -> None:
    x = torch.full((5000,), size)
    assert squared_norm([x], backend="native").item() == pytest.approx(5000 * x[0].double().item() ** 2, rel=1e-14)


@pytest.mark.parametrize("dtype", [torch.float64, *LOW], ids=str)
def test_threads_do_not_change_a_bit(cpu_kernels: None, dtype: torch.dtype) -> None:
    tensors = Flat([*SIZES, 300_000], dtype).tensors
    alone, *others = with_threads(lambda: squared_norm(tensors, backend="native").item())
    assert others == [alone] * len(others)


def test_the_order_of_a_blocks_threads_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = Flat(SIZES, torch.float32).tensors
    first, second = in_both_orders(lambda: squared_norm(tensors, backend="native").item(), monkeypatch)
    assert first == second


@DTYPES
def test_scaling_is_a_multiplication_and_stays_inside(kernels: str, dtype: torch.dtype) -> None:
    for sizes in (SIZES, MANY):
        parts = Flat(sizes, dtype)
        expected = [reference_scaled(x, 0.1234) for x in parts.tensors]
        scale_(parts.tensors, 0.1234, backend="native")
        assert all(map(torch.equal, parts.tensors, expected))
        parts.assert_neighbours_kept()


@dataclass
class Training:
    """Weights and moments of ``sizes``, gradients of each step, and 16-bit copies if ``copy`` is a type."""

    sizes: Sequence[int] = tuple(SIZES)
    grad: torch.dtype = torch.float32
    copy: torch.dtype | None = None

    def __post_init__(self) -> None:
        wide = torch.promote_types(self.grad, torch.float32)
        self.weights = Flat(self.sizes, wide, 1)
        self.means, self.squares = Flat(self.sizes, wide, 2), Flat(self.sizes, wide, 3)
        for tensor in (*self.means.tensors, *self.squares.tensors):
            tensor.zero_()
        self.copies = Flat(self.sizes if self.copy else (), self.copy or wide, 4)

    @property
    def state(self) -> list[list[Tensor]]:
        return [self.weights.tensors, self.means.tensors, self.squares.tensors]

    def gradients(self, step: int) -> list[Tensor]:
        return Flat(self.sizes, self.grad, 10 + step).tensors

    def run(self, steps: int, backend: str, factor: float = 1.0) -> None:
        for step in range(1, steps + 1):
            lists = (self.gradients(step), *self.state, self.copies.tensors)
            adamw_(*lists, step=step, factor=factor, backend=backend, **RATES)

    def definition(self, steps: int, factor: float = 1.0) -> list[list[Tensor]]:
        """The paper's algorithm 2 in float64: weights and moments after the given steps, from the current values."""
        (beta1, beta2), lr = RATES["betas"], RATES["lr"]
        weights, means, squares = ([x.double() for x in tensors] for tensors in self.state)
        for step in range(1, steps + 1):
            for i, grad in enumerate(self.gradients(step)):
                g = factor * grad.double()
                means[i] = beta1 * means[i] + (1 - beta1) * g
                squares[i] = beta2 * squares[i] + (1 - beta2) * g * g
                root = (squares[i] / (1 - beta2**step)).sqrt() + RATES["epsilon"]
                weights[i] = weights[i] - lr * RATES["weight_decay"] * weights[i]
                weights[i] = weights[i] - lr * means[i] / (1 - beta1**step) / root
        return [weights, means, squares]


def assert_state_near(found: list[list[Tensor]], expected: list[list[Tensor]], bound: float) -> None:
    for mine, right in zip(found, expected, strict=True):
        for a, b in zip(mine, right, strict=True):
            torch.testing.assert_close(a.double(), b.double(), rtol=bound, atol=bound)


@pytest.mark.parametrize("copy", [None, torch.bfloat16, torch.float16], ids=str)
@DTYPES
def test_adamw_is_the_papers(kernels: str, dtype: torch.dtype, copy: torch.dtype | None) -> None:
    training = Training(grad=dtype, copy=copy)
    expected = training.definition(3, factor=0.3)
    training.run(3, "native", factor=0.3)
    assert_state_near(training.state, expected, 1e-6)
    for parts in (training.weights, training.means, training.squares, training.copies):
        parts.assert_neighbours_kept()
    if copy is not None:
        narrow = [weight.to(copy) for weight in training.weights.tensors]
        assert all(map(torch.equal, training.copies.tensors, narrow))


@ANY
@given(sizes=SOME_SIZES, grad=st.sampled_from(LOW), copy=st.sampled_from([None, *LOW[1:]]))
def test_adamw_of_any_sizes(kernels: str, sizes: list[int], grad: torch.dtype, copy: torch.dtype | None) -> None:
    training = Training(sizes, grad, copy)
    expected = training.definition(2)
    training.run(2, "native")
    assert_state_near(training.state, expected, 1e-6)


def test_adamw_of_more_tensors_than_a_table_has(kernels: str) -> None:
    training = Training(MANY, copy=torch.bfloat16)
    expected = training.definition(1)
    training.run(1, "native")
    assert_state_near(training.state, expected, 1e-6)


def torchs(training: Training, steps: int) -> list[list[Tensor]]:
    """The results of torch.optim.AdamW for the same weights and gradients."""
    weights = [weight.clone() for weight in training.weights.tensors]
    rates = {"lr": RATES["lr"], "betas": RATES["betas"], "eps": RATES["epsilon"]}
    adam = torch.optim.AdamW(weights, weight_decay=RATES["weight_decay"], fused=True, **rates)
    for step in range(1, steps + 1):
        for weight, grad in zip(weights, training.gradients(step), strict=True):
            weight.grad = grad
        adam.step()
    moments = [[adam.state[weight][name] for weight in weights] for name in ("exp_avg", "exp_avg_sq")]
    return [weights, *moments]


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-15), (torch.float32, 4e-7)], ids=str)
def test_adamw_is_torchs_step_by_step(cpu_kernels: None, dtype: torch.dtype, bound: float) -> None:
    for steps in range(1, 6):
        training = Training(grad=dtype)
        expected = torchs(training, steps)
        training.run(steps, "native")
        assert_state_near(training.state, expected, bound)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_the_reference_is_torchs_adamw_to_the_bit(dtype: torch.dtype) -> None:
    training = Training(grad=dtype)
    expected = torchs(training, 3)
    training.run(3, "reference")
    for mine, right in zip(training.state, expected, strict=True):
        assert all(map(torch.equal, mine, right))


def test_the_references_are_the_definitions() -> None:
    training = Training(grad=torch.bfloat16, copy=torch.bfloat16)
    expected = training.definition(2, factor=0.3)
    training.run(2, "reference", factor=0.3)
    assert_state_near(training.state, expected, 1e-6)
    tensors = Flat(SIZES, torch.float64).tensors
    assert squared_norm(tensors, backend="reference").item() == pytest.approx(exact_sum(tensors), rel=1e-14)


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_adamw_takes_no_notice_of_threads(cpu_kernels: None, dtype: torch.dtype) -> None:
    def weights() -> Tensor:
        training = Training([300_000], dtype)
        training.run(2, "native")
        return training.weights.tensors[0]

    alone, *others = with_threads(weights)
    assert all(torch.equal(alone, other) for other in others)


def test_a_weight_does_not_depend_on_its_place(kernels: str) -> None:  # C11
    """Copies of a tied or replicated weight are at different offsets in other ranks' buffers."""
    whole = Training([203], copy=torch.bfloat16)
    whole.run(1, "native")
    (grad,), lists = whole.gradients(2), [*whole.state, whole.copies.tensors]
    slices = [(start, start + 61) for start in range(1, 36)]
    parts = [[[x[a:b].clone() for (x,) in lists], grad[a:b].clone()] for a, b in slices]
    whole_lists = [[grad], *lists]
    adamw_(*whole_lists, step=3, factor=0.7, backend="native", **RATES)
    for (a, b), (state, part) in zip(slices, parts, strict=True):
        adamw_([part], *([x] for x in state), step=3, factor=0.7, backend="native", **RATES)
        assert all(torch.equal(mine, x[a:b]) for mine, (x,) in zip(state, lists, strict=True))


def test_new_memory_is_written_before_it_is_read(kernels: str) -> None:
    with poisoned_memory():
        tensors = Flat(SIZES, torch.float32).tensors
        assert squared_norm(tensors, backend="native").item() == pytest.approx(exact_sum(tensors), rel=1e-14)


@AS_BUILT
def test_opcheck(kernels: str) -> None:
    ops, training = torch.ops.megatron_core, Training((5, 40), copy=torch.bfloat16)
    torch.library.opcheck(ops.squared_norm, (training.gradients(1),))
    torch.library.opcheck(ops.scale_, (training.gradients(1), 0.5))
    lists = (training.gradients(1), *training.state, training.copies.tensors)
    torch.library.opcheck(ops.adamw_, (*lists, 0.5, 0.9, 0.95, 0.99, 0.1, 2.0, 1e-8))


def test_torch_compile_gives_the_same(cpu_kernels: None) -> None:
    def step(grads: list[Tensor], *state: list[Tensor]) -> Tensor:
        norm = squared_norm(grads, backend="native").sqrt()
        scale_(grads, 0.5, backend="native")
        adamw_(grads, *state, step=1, backend="native", **RATES)
        return norm

    results = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        training = Training((5, 40), copy=torch.bfloat16)
        norm = function(training.gradients(1), *training.state, training.copies.tensors)
        results.append([norm, *training.weights.tensors, *training.copies.tensors])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_an_empty_list_is_nothing_to_do(cpu_kernels: None, backend: str) -> None:
    assert squared_norm([], backend=backend).item() == 0.0
    scale_([], 2.0, backend=backend)
    adamw_([], [], [], [], step=1, backend=backend, **RATES)


def test_there_is_no_backward_and_it_says_so(cpu_kernels: None) -> None:  # C52
    x = draw((8,), torch.float32).requires_grad_()
    with pytest.raises(NotImplementedError, match=r"squared_norm has no backward.*reference"):
        squared_norm([x], backend="native")
    squared_norm([x], backend="reference").backward()
    torch.testing.assert_close(x.grad, 2 * x.detach())


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_wrong_arguments_are_named(cpu_kernels: None, backend: str) -> None:
    x = draw((4, 6), torch.float32)
    with pytest.raises(
        ConfigError, match=r"squared_norm: tensors\[1\] is torch.float64 and tensors\[0\] torch.float32"
    ):
        squared_norm([x, x.double()], backend=backend)
    with pytest.raises(ConfigError, match=r"scale_: tensors\[0\] has strides \(1, 6\); it must be contiguous"):
        scale_([x.t()], 2.0, backend=backend)
    rest = {"step": 1, "backend": backend, **RATES}
    with pytest.raises(ConfigError, match=r"adamw_: exp_avgs have \[23\] elements and weights \[24\]"):
        adamw_([x], [x], [x.flatten()[1:]], [x], **rest)
    with pytest.raises(ConfigError, match=r"adamw_: copies are torch.float32 with torch.float32 weights"):
        adamw_([x], [x], [x], [x], [x], **rest)
    with pytest.raises(ConfigError, match=r"adamw_: weights are torch.bfloat16.*must be float32"):
        adamw_([x.bfloat16()], [x.bfloat16()], [x], [x], **rest)
