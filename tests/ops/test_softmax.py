"""attention_softmax, causal, with masks and with a sliding window: both native kernels against the definition in
float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_core.errors import ConfigError
from megatron_core.ops import attention_softmax, native, reference
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

SCALE = 0.7
KINDS = {
    "all": {},
    "causal": {"causal": True},
    "window": {"window": 3},
    "wide window": {"causal": True, "window": 1000},
}
BACKENDS = pytest.mark.parametrize("backend", ["native", "reference"])


def definition(
    scores: Tensor, mask: Tensor | None = None, *, causal: bool = False, window: int | None = None
) -> Tensor:
    """The definition, with an index for every query and key."""
    queries, keys = scores.shape[-2:]
    key, own = torch.arange(keys), torch.arange(keys - queries, keys)[:, None]
    seen = torch.ones(scores.shape, dtype=torch.bool)
    if causal or window is not None:
        seen = seen & (key <= own)
    if window is not None:
        seen = seen & (key > own - window)
    if mask is not None:
        seen = seen & ~mask
    scaled = (SCALE * scores).masked_fill(~seen, -torch.inf)
    top = scaled.detach().amax(-1, keepdim=True) if keys else 0.0
    top = torch.where(seen.any(-1, keepdim=True), top, 0.0)
    exponentials = torch.where(seen, (scaled - top).exp(), 0.0)
    total = exponentials.sum(-1, keepdim=True)
    return exponentials / torch.where(seen.any(-1, keepdim=True), total, 1.0)


def results(scores: Tensor, dy: Tensor, mask: Tensor | None = None, backend: str = "native", **kind: object) -> list:
    """Probabilities and gradient."""
    scores = scores.detach().requires_grad_()
    probs = attention_softmax(scores, mask, scale=SCALE, backend=backend, **kind)
    return [probs.detach(), *torch.autograd.grad(probs, scores, dy)]


def exact(scores: Tensor, dy: Tensor, mask: Tensor | None = None, **kind: object) -> list[Tensor]:
    scores = scores.detach().double().requires_grad_()
    probs = definition(scores, mask, **kind)
    return [probs.detach(), *torch.autograd.grad(probs, scores, dy.double())]


def check_near(found: list[Tensor], expected: list[Tensor], dy: Tensor) -> None:
    """The gradient is the remainder of cancelling terms, and the bound is relative to these terms. In float16, results
    below 6e-5, as in rows of many keys, are rounded to multiples of 6e-8."""
    (probs, dscores), (exact_probs, exact_dscores) = found, expected
    bound, steps = BOUND[probs.dtype], 6e-8 * probs.numel() ** 0.5 if probs.dtype == torch.float16 else 0.0
    assert dscores.dtype == probs.dtype == dy.dtype
    assert_near([probs], [exact_probs], bound, steps)
    assert_near([dscores], [exact_dscores], bound, steps + bound * SCALE * (exact_probs * dy.double()).norm().item())


def check(shape: tuple[int, ...], dtype: torch.dtype, mask: Tensor | None = None, **kind: object) -> None:
    scores, dy = draw(shape, dtype), draw(shape, dtype, 1)
    check_near(results(scores, dy, mask, **kind), exact(scores, dy, mask, **kind), dy)


def draw_mask(shape: tuple[int, ...], broadcast: tuple[bool, ...] = ()) -> Tensor:
    """A third is masked, and all of the first row if there are several; dims of ``broadcast`` have one element."""
    sizes = tuple(1 if one else n for n, one in zip(shape, broadcast or (False,) * len(shape), strict=True))
    mask = draw(sizes, torch.float32, 2) < -0.4
    if mask[..., :1].numel() > 1:
        mask.flatten(0, -2)[0] = True
    return mask


SHAPES = [(1, 1), (5, 7), (7, 5), (2, 6, 64), (2, 3, 4, 33), (9, 130), (3, 4096), (2, 65536), (2, 16391)]
EMPTY = [(0, 8), (2, 3, 0, 5), (2, 0)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("shape", SHAPES + EMPTY, ids=str)
def test_output_and_gradient_are_those_of_the_definition(
    kernels: str, shape: tuple[int, ...], dtype: torch.dtype, kind: str
) -> None:  # C55
    check(shape, dtype, **KINDS[kind])
    check(shape, dtype, draw_mask(shape), **KINDS[kind])


@ANY
@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    keys=st.integers(1, 200),
    dtype=st.sampled_from(LOW),
    causal=st.booleans(),
    window=st.none() | st.integers(1, 40),
    broadcast=st.none() | st.lists(st.booleans(), min_size=4, max_size=4),
)
def test_any_shape(
    kernels: str,
    shape: list[int],
    keys: int,
    dtype: torch.dtype,
    causal: bool,
    window: int | None,
    broadcast: list[bool] | None,
) -> None:
    sizes = (*shape, keys)
    mask = None if broadcast is None else draw_mask(sizes, tuple(broadcast[: len(sizes)]))
    check(sizes, dtype, mask, causal=causal, window=window)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_inputs_and_gradients_need_not_be_contiguous(kernels: str, dtype: torch.dtype, kind: str) -> None:  # C22, C55
    scores, dy, mask = draw((4, 6, 32), dtype), draw((4, 6, 32), dtype, 1), draw_mask((4, 6, 32))
    expected = exact(scores, dy, mask, **KINDS[kind])
    for (name, x), (_, g), (_, m) in zip(views(scores), views(dy), views(mask), strict=True):
        assert not x.is_contiguous() and torch.equal(x, scores), name
        for case in ((x, dy, mask), (scores, g, mask), (scores, dy, m), (x, g, m)):
            check_near(results(*case, **KINDS[kind]), expected, dy)


@pytest.mark.parametrize(
    "broadcast", [(0, 1, 0, 0), (1, 1, 0, 0), (0, 1, 1, 0), (1, 1, 1, 0), (0, 1, 0, 1), (1, 1, 1, 1)], ids=str
)
def test_a_mask_broadcasts(kernels: str, broadcast: tuple[int, ...]) -> None:
    shape = (2, 3, 5, 48)
    mask = draw_mask(shape, tuple(map(bool, broadcast)))
    for given_mask in (mask, mask.expand(shape)):
        check(shape, torch.float32, given_mask, causal=True)
    check(shape, torch.float32, mask[0], window=7)


@pytest.mark.parametrize("sizes", [(2, 1, 5, 48), (1, 1, 5, 48), (2, 1, 1, 48), (48,)], ids=str)
def test_a_mask_that_broadcasts_is_not_copied(sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    mask, handed = torch.zeros(sizes, dtype=torch.bool), []
    monkeypatch.setattr(native, "unavailable_reason", lambda *kind: None)
    monkeypatch.setattr(native, "call", lambda function, device, *values: handed.extend(values))
    attention_softmax(torch.zeros(2, 3, 5, 48), mask, backend="native")
    (given_mask,) = (x for x in handed if isinstance(x, Tensor) and x.dtype == torch.bool)
    assert given_mask.data_ptr() == mask.data_ptr()


@pytest.mark.parametrize("kind", [{"causal": True}, {"window": 3}, {"window": 200}], ids=str)
@pytest.mark.parametrize("keys", [33, 64, 4096])
def test_what_the_triangle_and_the_window_hide_is_not_read(kernels: str, kind: dict, keys: int) -> None:
    scores, dy = draw((2, 9, keys), torch.float32), draw((2, 9, keys), torch.float32, 1)
    expected = results(scores, dy, **kind)
    hidden = definition(torch.ones(scores.shape, dtype=torch.float64), **kind) == 0
    found = results(scores.masked_fill(hidden, torch.nan), dy.masked_fill(hidden, torch.nan), **kind)
    for mine, right in zip(found, expected, strict=True):
        assert torch.equal(mine, right)
        assert (mine[hidden] == 0).all()


def test_masked_scores_do_not_count_whatever_they_are(kernels: str) -> None:
    scores, dy, mask = draw((4, 40), torch.float32), draw((4, 40), torch.float32, 1), draw_mask((4, 40))
    expected = results(scores, dy, mask)
    for value in (torch.nan, torch.inf, -torch.inf, 3e38):
        for mine, right in zip(results(scores.masked_fill(mask, value), dy, mask), expected, strict=True):
            assert torch.equal(mine, right)


@BACKENDS
@pytest.mark.parametrize("keys", [5, 64])
def test_a_row_that_sees_nothing_is_zero(kernels: str, backend: str, keys: int) -> None:
    """So is its gradient: because of the mask, or because there are more queries than keys."""
    scores, dy = draw((2, 70, keys), torch.float32), draw((2, 70, keys), torch.float32, 1)
    mask = torch.zeros(2, 70, 1, dtype=torch.bool)
    mask[0, 69] = True
    for kind in ({"causal": True}, {"window": 3}):
        for tensor in results(scores, dy, backend=backend, **kind):
            assert (tensor[:, : 70 - keys] == 0).all() and (tensor[:, 71 - keys :].abs().sum(-1) > 0).all()
    probs, dscores = results(scores, dy, mask, backend)
    assert (probs[0, 69] == 0).all() and (dscores[0, 69] == 0).all()
    assert (probs[1] > 0).all() and dscores.isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(3, 5), (2, 4, 3), (2, 2, 3, 9)], ids=str)
def test_gradcheck(cpu_kernels: None, shape: tuple[int, ...], kind: str) -> None:  # C55
    scores, mask = draw(shape, torch.float64), draw_mask(shape)
    strided = scores.transpose(0, 1).contiguous().transpose(0, 1)
    for x in (scores.requires_grad_(), strided.requires_grad_()):
        for given_mask in (None, mask):
            torch.autograd.gradcheck(
                lambda x, mask=given_mask: attention_softmax(x, mask, scale=SCALE, backend="native", **KINDS[kind]), x
            )
    dy = draw(shape, torch.float64, 1)
    check_near(results(scores, dy, mask, **KINDS[kind]), exact(scores, dy, mask, **KINDS[kind]), dy)


@AS_BUILT
def test_opcheck(kernels: str) -> None:
    scores, dy, mask = draw((3, 4, 24), torch.float32), draw((3, 4, 24), torch.float32, 1), draw_mask((3, 4, 24))
    ops = torch.ops.megatron_core
    torch.library.opcheck(ops.attention_softmax, (scores.requires_grad_(), None, SCALE, True, None))
    torch.library.opcheck(ops.attention_softmax, (scores.transpose(0, 1), mask.transpose(0, 1), SCALE, False, 3))
    probs = attention_softmax(scores.detach(), mask, backend="native")
    torch.library.opcheck(ops.attention_softmax_backward, (dy, probs, SCALE, False, None))
    torch.library.opcheck(ops.attention_softmax_backward, (dy.transpose(0, 1), probs.transpose(0, 1), SCALE, True, 3))


@pytest.mark.parametrize("kind", KINDS)
def test_every_element_is_written(kernels: str, kind: str) -> None:
    """New memory is NaN here, and results have none."""
    with poisoned_memory():
        for shape in ((5, 7), (2, 3, 5, 130), (3, 4096)):
            check(shape, torch.float32, **KINDS[kind])
            check(shape, torch.bfloat16, draw_mask(shape), **KINDS[kind])


def test_torch_compile_gives_the_same(cpu_kernels: None) -> None:
    scores, dy, mask = draw((6, 40), torch.float32), draw((6, 40), torch.float32, 1), draw_mask((6, 40))

    def function(x: Tensor, mask: Tensor | None) -> Tensor:
        return attention_softmax(x * 2, mask, scale=SCALE, causal=True, backend="native") + 1

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for given_mask in (None, mask):
        x, other = (scores.detach().requires_grad_() for _ in range(2))
        found, expected = compiled(x, given_mask), function(other, given_mask)
        assert torch.equal(found, expected)
        assert torch.equal(torch.autograd.grad(found, x, dy)[0], torch.autograd.grad(expected, other, dy)[0])


def test_the_order_of_a_blocks_threads_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reveals a missing barrier."""
    for shape in ((3, 4096), (2, 20000)):
        scores, dy, mask = draw(shape, torch.float32), draw(shape, torch.float32, 1), draw_mask(shape)
        first, second = in_both_orders(lambda case=(scores, dy, mask): results(*case, causal=True), monkeypatch)
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_threads_do_not_change_a_bit(cpu_kernels: None, dtype: torch.dtype) -> None:
    scores, dy, mask = draw((3, 111, 130), dtype), draw((3, 111, 130), dtype, 1), draw_mask((3, 111, 130))
    alone, *others = with_threads(lambda: results(scores, dy, mask, causal=True))
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(alone, other, strict=True))


@pytest.mark.parametrize("keys", [64, 130])
def test_a_row_does_not_depend_on_the_others(kernels: str, keys: int) -> None:
    scores, dy = draw((5, 9, keys), torch.bfloat16), draw((5, 9, keys), torch.bfloat16, 1)
    whole = results(scores, dy, causal=True)
    alone = results(scores[3:4, 5:], dy[3:4, 5:], causal=True)
    for all_rows, some_rows in zip(whole, alone, strict=True):
        assert torch.equal(all_rows[3:4, 5:], some_rows)


def test_extreme_values(kernels: str) -> None:
    """Large and subnormal numbers, infinities and NaN are handled like in PyTorch's softmax; a row of -inf is NaN."""
    rows = [[65504.0, -65504.0, 6e-8, 0.0], [1.0, torch.inf, 0.0, 2.0], [1.0, torch.nan, 0.0, 2.0]]
    rows += [[-torch.inf, 1.0, -torch.inf, 2.0], [-torch.inf] * 4, [300.0, 200.0, 290.0, 299.9], [torch.nan] * 4]
    for dtype, bound in {torch.float32: 5e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}.items():
        scores = torch.tensor(rows).repeat(1, 16).to(dtype)
        found = attention_softmax(scores, scale=SCALE, backend="native")
        expected = (scores.double() * SCALE).softmax(-1)
        assert torch.equal(found.isnan(), expected.isnan())
        torch.testing.assert_close(found, expected.to(dtype), rtol=bound, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(5, 7), (7, 5), (2, 4, 3), (2, 3, 4, 9)], ids=str)
def test_the_reference_is_the_definition(shape: tuple[int, ...], kind: str) -> None:
    scores, dy = draw(shape, torch.float64), draw(shape, torch.float64, 1)
    settings_of = {"causal": False, "window": None} | KINDS[kind]
    for mask in (None, draw_mask(shape)):
        expected = exact(scores, dy, mask, **KINDS[kind])
        check_near(results(scores, dy, mask, "reference", **KINDS[kind]), expected, dy)
        assert torch.equal(
            reference.attention_softmax(scores, mask, SCALE, **settings_of),
            attention_softmax(scores, mask, scale=SCALE, backend="reference", **KINDS[kind]),
        )


@BACKENDS
def test_wrong_arguments_are_named(cpu_kernels: None, backend: str) -> None:
    scores, mask = draw((2, 3, 8), torch.float32), torch.zeros(2, 3, 8, dtype=torch.bool)
    wrong = {
        r"mask is \[2, 3, 7\]; it must broadcast to the scores' \[2, 3, 8\]": (scores, mask[..., :7], None),
        r"mask is \[1, 2, 3, 8\]; it must broadcast to the scores' \[2, 3, 8\]": (scores, mask[None], None),
        r"mask is torch.uint8 on cpu; it must be torch.bool on cpu": (scores, mask.byte(), None),
        r"window=0; a query sees at least its own key": (scores, mask, 0),
        r"scores are \[8\] of torch.float32; they must be \[queries, keys\]": (scores[0, 0], None, None),
        r"scores are \[1, 1, 2, 3, 8\]": (scores[None, None], None, None),
    }
    for said, (given_scores, given_mask, window) in wrong.items():
        with pytest.raises(ConfigError, match=said):
            attention_softmax(given_scores, given_mask, window=window, backend=backend)
    with pytest.raises(ConfigError, match=r"of torch.int64; they must be .* of a floating-point type"):
        attention_softmax(scores.long(), backend="auto")
