"""cross_entropy: both native kernels, and the loss computed with them, against the definition in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_core.errors import ConfigError
from megatron_core.ops import Backend, cross_entropy_backward, cross_entropy_parts, reference
from megatron_core.parallel.groups import LocalGroup
from megatron_core.tensor_parallel import vocab_parallel_cross_entropy
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

SMOOTHING = 0.2


def labels(shape: tuple[int, ...], valid: int) -> Tensor:
    """Targets among the first ``valid`` columns, the same on every device."""
    return (draw(shape, torch.float64, 7).abs() * 1e4).long() % valid


def definition(logits: Tensor, target: Tensor, valid: int, smoothing: float) -> Tensor:
    """-sum_v q_v log p_v with p = softmax(z), q = (1 - e) [target] + e / V."""
    log_p = logits[..., :valid] - logits[..., :valid].logsumexp(-1, keepdim=True)
    at_target = log_p.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    return -(1 - smoothing) * at_target - smoothing * log_p.mean(-1)


def losses_of(
    logits: Tensor,
    target: Tensor,
    valid: int | None = None,
    smoothing: float = SMOOTHING,
    *,
    overwrite: bool = False,
    backend: Backend = "native",
) -> Tensor:
    return vocab_parallel_cross_entropy(
        logits,
        target,
        smoothing,
        LocalGroup(),
        vocab_size=valid,
        overwrite_logits=overwrite,
        backend=backend,
    )


def results(logits: Tensor, target: Tensor, dloss: Tensor, **options: object) -> list[Tensor]:
    """Losses and the gradient of the logits."""
    leaf = logits.detach().requires_grad_()
    losses = losses_of(leaf, target, **options)
    return [losses, *torch.autograd.grad(losses, leaf, dloss.to(losses.dtype))]


def exact(logits: Tensor, target: Tensor, dloss: Tensor, valid: int, smoothing: float = SMOOTHING) -> list[Tensor]:
    leaf = logits.detach().double().requires_grad_()
    losses = definition(leaf, target, valid, smoothing)
    return [losses, *torch.autograd.grad(losses, leaf, dloss.double())]


def check_losses(logits: Tensor, dloss: Tensor, valid: int, smoothing: float = SMOOTHING, **options: object) -> None:
    target = labels(logits.shape[:-1], valid)
    right_losses, right_grad = exact(logits, target, dloss, valid, smoothing)
    losses, grad = results(
        logits.clone() if options.get("overwrite") else logits,
        target,
        dloss,
        valid=valid,
        smoothing=smoothing,
        **options,
    )
    assert losses.dtype == torch.float32 and grad.dtype == logits.dtype
    assert torch.equal(grad[..., valid:], torch.zeros_like(grad[..., valid:])), "gradient of padding"
    # With one column all terms cancel.
    assert_near([losses], [right_losses], BOUND[torch.float32], 1e-6)
    assert_near([grad], [right_grad], BOUND[logits.dtype], 1e-6 * dloss.double().norm().item())


SHAPES = [(1, 1), (7,), (5, 7), (3, 2, 64), (2, 3, 2, 33), (70, 130), (3, 6144), (2, 20001), (0, 8)]


@pytest.mark.parametrize("overwrite", [False, True], ids=["new", "in place"])
@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_losses_and_gradients_are_those_of_the_definition(
    kernels: str, shape: tuple[int, ...], dtype: torch.dtype, overwrite: bool
) -> None:  # C55
    logits, dloss = 3 * draw(shape, dtype), draw(shape[:-1], dtype, 1)
    for valid in {shape[-1], max(shape[-1] - 5, 1)}:
        check_losses(logits, dloss, valid, overwrite=overwrite)


@ANY
@given(
    shape=st.lists(st.integers(1, 9), max_size=3),
    size=st.integers(1, 300),
    padding=st.integers(0, 40),
    smoothing=st.sampled_from([0.0, SMOOTHING]),
    dtype=st.sampled_from(LOW),
    overwrite=st.booleans(),
)
def test_any_shape(
    kernels: str, shape: list[int], size: int, padding: int, smoothing: float, dtype: torch.dtype, overwrite: bool
) -> None:
    logits, dloss = draw((*shape, size + padding), dtype), draw(tuple(shape), dtype, 1)
    check_losses(logits, dloss, size, smoothing, overwrite=overwrite)


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("count", [1, 3, 5])
@pytest.mark.parametrize("backend", ["native", "reference"])
def test_parts_of_a_split_vocabulary(kernels: str, dtype: torch.dtype, count: int, backend: Backend) -> None:
    """The statistics of each rank's columns; the last ranks have padding or only padding."""
    logits = 3 * draw((4, 3, 120), dtype)
    valid, target = 70, labels((4, 3), 70)
    for number, part in enumerate(logits.chunk(count, -1)):
        first, here = number * part.shape[-1], min(max(valid - number * part.shape[-1], 0), part.shape[-1])
        z = part[..., :here].double()
        of_target = torch.nn.functional.one_hot(target, 120).bool()[..., first : first + here]
        maximum, exp_sum, z_target, z_sum = cross_entropy_parts(part, target, first, here, backend=backend)
        if here == 0:
            assert (maximum == -torch.inf).all() and not torch.stack([exp_sum, z_target, z_sum]).any()
            continue
        assert torch.equal(maximum.double(), z.amax(-1))
        assert torch.equal(z_target.double(), z.masked_fill(~of_target, 0.0).sum(-1))
        right = [(z - z.amax(-1, keepdim=True)).exp().sum(-1), z.sum(-1)]
        assert_near([exp_sum, z_sum], right, BOUND[torch.float32])


@pytest.mark.parametrize("overwrite", [False, True], ids=["new", "in place"])
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_logits_and_gradients_need_not_be_contiguous(kernels: str, dtype: torch.dtype, overwrite: bool) -> None:
    # C22, C55
    x, dloss = draw((4, 6, 32), dtype), draw((4, 6), dtype, 1)
    target = labels((4, 6), 30)
    expected = exact(x, target, dloss, 30)
    for name, view in views(x):
        assert not view.is_contiguous() and torch.equal(view, x), name
        for grads in (dloss, dloss.t().contiguous().t()):
            view_of_new = next(found for other, found in views(x) if other == name)
            found = results(view_of_new, target.t().contiguous().t(), grads, valid=30, overwrite=overwrite)
            assert_near(found[:1], expected[:1], BOUND[torch.float32])
            assert_near(found[1:], expected[1:], BOUND[dtype])
    one = torch.ones((), dtype=dtype).expand(4, 6)
    assert_near(results(x, target, one, valid=30)[1:], exact(x, target, one, 30)[1:], BOUND[dtype])


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 1, 2)], ids=len)
@pytest.mark.parametrize("smoothing", [0.0, SMOOTHING])
def test_gradcheck(cpu_kernels: None, shape: tuple[int, ...], smoothing: float) -> None:  # C55
    logits, target = draw((*shape, 9), torch.float64), labels(shape, 7)
    strided = torch.stack([logits, logits], -1)[..., 0]
    for leaf in (logits.clone().requires_grad_(), strided.requires_grad_()):
        assert torch.autograd.gradcheck(lambda z: losses_of(z, target, 7, smoothing), leaf)


@AS_BUILT
def test_opcheck(kernels: str) -> None:
    logits, target = draw((3, 4, 24), torch.float32), labels((3, 4), 20)
    ops = torch.ops.megatron_core
    torch.library.opcheck(ops.cross_entropy_parts, (logits, target, 0, 20))
    torch.library.opcheck(ops.cross_entropy_parts, (logits.transpose(0, 1), target.t(), 5, 24))
    statistics = cross_entropy_parts(logits, target, 0, 20)[:2]
    inputs = (draw((3, 4), torch.float32, 1), logits, target, statistics, 0, 20, 0.9, 0.005)
    torch.library.opcheck(ops.cross_entropy_backward, inputs)
    torch.library.opcheck(ops.cross_entropy_backward_, inputs)


def test_every_element_is_written(kernels: str) -> None:
    """New memory is NaN here, and results have none."""
    with poisoned_memory():
        for shape in ((5, 7), (40, 130), (2, 4096)):
            check_losses(draw(shape, torch.float32), draw(shape[:-1], torch.float32, 1), shape[-1] - 3)


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_the_gradient_takes_the_place_of_the_logits(cpu_kernels: None, dtype: torch.dtype, backend: Backend) -> None:
    logits, target = draw((6, 40), dtype).requires_grad_(), labels((6,), 40)
    expected = results(logits, target, torch.ones(6), backend=backend)[1]
    losses = losses_of(logits, target, overwrite=True, backend=backend)
    (grad,) = torch.autograd.grad(losses, logits, torch.ones(6), retain_graph=True)
    assert grad.data_ptr() == logits.data_ptr() and torch.equal(grad, expected)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(losses, logits, torch.ones(6))


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_a_second_backward_is_the_same_where_nothing_is_overwritten(cpu_kernels: None, backend: Backend) -> None:
    logits, target = draw((6, 40), torch.bfloat16).requires_grad_(), labels((6,), 40)
    losses = losses_of(logits, target, backend=backend)
    first, second = (torch.autograd.grad(losses.sum(), logits, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_torch_compile_gives_the_same(cpu_kernels: None) -> None:
    logits, dloss, target = draw((6, 40), torch.float32), draw((6,), torch.float32, 1), labels((6,), 37)

    def function(z: Tensor) -> Tensor:
        return losses_of(z * 2, target, 37) + 1

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    leaf = logits.requires_grad_()
    assert torch.equal(compiled(leaf), function(leaf))
    mine, right = (torch.autograd.grad(f(leaf), leaf, dloss)[0] for f in (compiled, function))
    assert torch.equal(mine, right)


def test_a_gradient_in_place_of_the_logits_has_no_derivative(cpu_kernels: None) -> None:  # C52
    logits, target = draw((3, 8), torch.float32).requires_grad_(), labels((3,), 8)
    for backend in ("native", "reference"):
        losses = losses_of(logits, target, overwrite=True, backend=backend)
        with pytest.raises(NotImplementedError, match=r"overwrite_logits=True: .* set it to False"):
            torch.autograd.grad(losses.sum(), logits, create_graph=True)
    parts = cross_entropy_parts(logits, target, 0, 8, backend="native")
    with pytest.raises(NotImplementedError, match=r"has no backward; take .*vocab_parallel_cross_entropy"):
        parts.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_order_of_a_blocks_threads_does_not_matter(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reveals a missing barrier."""
    logits, dloss, target = draw((9, 5000), dtype), draw((9,), dtype, 1), labels((9,), 4990)

    def work() -> list[Tensor]:
        new = results(logits, target, dloss, valid=4990)
        return new + results(logits.clone(), target, dloss, valid=4990, overwrite=True)

    first, second = in_both_orders(work, monkeypatch)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_threads_do_not_change_a_bit(cpu_kernels: None, dtype: torch.dtype) -> None:
    logits, dloss, target = draw((333, 130), dtype), draw((333,), dtype, 1), labels((333,), 130)
    alone, *others = with_threads(lambda: results(logits, target, dloss))
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(alone, other, strict=True))


@pytest.mark.parametrize("size", [64, 130])
def test_a_row_does_not_depend_on_the_others(kernels: str, size: int) -> None:
    logits, dloss, target = draw((70, size), torch.float32), draw((70,), torch.float32, 1), labels((70,), size)

    def of(rows: slice) -> list[Tensor]:
        return results(logits[rows], target[rows], dloss[rows])

    for whole, alone in zip(of(slice(None)), of(slice(37, 38)), strict=True):
        assert torch.equal(whole[37:38], alone)


def test_extreme_values(kernels: str) -> None:
    """Infinities, NaN, and the ends of float16 give the same results as PyTorch's cross entropy."""
    inf, nan, most, least = torch.inf, torch.nan, 65504.0, 6e-8
    rows = [[most, -most, 0.0], [least, -least, 3e-6], [1.0, -inf, 2.0], [-inf, 1.0, -inf], [inf, 0.0, 1.0]]
    rows += [[nan, 0.0, 1.0], [-inf, -inf, -inf], [inf, inf, -inf], [-most, -most, -most], [-inf, nan, -inf]]
    for dtype in (torch.float16, torch.float32):
        for wide in (1, 9, 41):  # a single row, a row with a remainder, several packs
            logits = torch.tensor(rows, dtype=dtype).repeat_interleave(wide, 1)
            for label in range(0, 3 * wide, wide):
                target = torch.full((len(rows),), label)
                losses, grad = results(logits, target, torch.ones(len(rows)), smoothing=0.0)
                leaf = logits.float().requires_grad_()
                expected = torch.nn.functional.cross_entropy(leaf, target, reduction="none")
                (expected_grad,) = torch.autograd.grad(expected.sum(), leaf)
                torch.testing.assert_close(losses, expected, equal_nan=True)
                finite = expected.isfinite()
                torch.testing.assert_close(grad[finite], expected_grad[finite].to(dtype))
                assert torch.equal(grad.isnan(), expected_grad.isnan())


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_wrong_arguments_are_named(cpu_kernels: None, backend: Backend) -> None:
    logits, target = draw((3, 8), torch.float32), labels((3,), 8)
    with pytest.raises(ConfigError, match=r"target is \[2\]; for logits \[3, 8\] it must be \[3\]"):
        cross_entropy_parts(logits, target[:2], 0, 8, backend=backend)
    with pytest.raises(ConfigError, match=r"target is torch.int32 on .*it must be torch.int64"):
        cross_entropy_parts(logits, target.int(), 0, 8, backend=backend)
    with pytest.raises(ConfigError, match=r"valid=9 of 8 columns"):
        cross_entropy_parts(logits, target, 0, 9, backend=backend)
    with pytest.raises(ConfigError, match=r"x is \[3, 0\]; its last dim must not be empty"):
        cross_entropy_parts(logits[:, :0], target, 0, 0, backend=backend)


def test_wrong_gradients_are_named(cpu_kernels: None) -> None:
    logits, target = draw((3, 8), torch.float32), labels((3,), 8)
    statistics = cross_entropy_parts(logits, target, 0, 8)[:2]
    options = {"label_smoothing": 0.0, "vocab_size": 8, "backend": "native"}
    with pytest.raises(ConfigError, match=r"dloss is torch.float32 \[2\]; .* it must be torch.float32 \[3\]"):
        cross_entropy_backward(torch.ones(2), logits, target, statistics, 0, 8, **options)
    with pytest.raises(ConfigError, match=r"statistics is torch.float64 \[2, 3\]; .* torch.float32 \[2, 3\]"):
        cross_entropy_backward(torch.ones(3), logits, target, statistics.double(), 0, 8, **options)


@pytest.mark.parametrize("smoothing", [0.0, SMOOTHING])
def test_the_reference_is_the_definition(smoothing: float) -> None:
    logits, dloss, target = draw((3, 4, 9), torch.float64), draw((3, 4), torch.float64, 1), labels((3, 4), 7)
    for overwrite in (False, True):
        options = {"valid": 7, "smoothing": smoothing, "backend": "reference", "overwrite": overwrite}
        found = results(logits.clone(), target, dloss, **options)
        assert_near(found, exact(logits, target, dloss, 7, smoothing), BOUND[torch.float64])


def test_each_target_is_in_one_part() -> None:
    """Of a vocabulary of 8 tokens that two ranks share."""
    logits = torch.arange(1.0, 9.0, dtype=torch.float64)
    targets = torch.arange(8)
    parts = [
        reference.cross_entropy_parts(part.expand(8, 4), targets, first, 4)[2]
        for first, part in zip((0, 4), logits.split(4), strict=True)
    ]
    assert parts[0].tolist() == [1, 2, 3, 4, 0, 0, 0, 0]
    assert parts[1].tolist() == [0, 0, 0, 0, 5, 6, 7, 8]
