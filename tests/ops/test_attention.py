"""The native kernel of causal attention, forward and backward, compared with the formula in float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from megatron_core.ops import native
from megatron_core.ops.attention import causal_attention, has_native_attention

BOUND = 2e-5
"""Scores reach 40: a few roundings of them, 5e-6 each, are relative errors of the weights."""


def formula(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention of ``[s, b, heads, d]`` with all scores in memory."""
    heads = query.shape[2] // key.shape[2]
    query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
    key, value = (x.repeat_interleave(heads, dim=1) for x in (key, value))
    scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value).permute(2, 0, 1, 3).flatten(2)


@pytest.fixture
def without_avx512(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use the library that a processor with AVX2 uses."""

    def forget() -> None:
        native.library.cache_clear()
        native._entry.cache_clear()

    monkeypatch.setattr(native, "LEVELS", dict.fromkeys(native.LEVELS, ("avx2",)))
    forget()
    yield
    forget()


SHAPES = [(1, 1, 1, 1, 8), (7, 2, 2, 1, 24), (48, 1, 2, 2, 16), (129, 2, 4, 2, 40), (300, 1, 3, 3, 72)]


@pytest.mark.usefixtures("without_avx512")
def test_the_library_for_avx2_is_the_formula() -> None:
    assert native.library_path("cpu", torch.float32).name != "libmegatron_cpu_avx512.so"
    for shape in SHAPES[1:4]:
        test_native_attention_is_the_formula(*shape)


@pytest.mark.parametrize(("length", "batch", "heads", "groups", "channels"), SHAPES)
def test_native_attention_is_the_formula(length: int, batch: int, heads: int, groups: int, channels: int) -> None:
    """Lengths below, at and above the sizes of blocks; scores far from 0; inputs as views of one projection."""
    random = torch.Generator().manual_seed(5)
    wide = torch.randn(length, batch, groups, heads // groups + 2, channels, generator=random)
    wide[..., 0, :] *= 8
    mixed, exact = wide.clone().requires_grad_(), wide.double().requires_grad_()

    def parts(x: Tensor) -> tuple[Tensor, ...]:
        query, key, value = x.split([heads // groups, 1, 1], dim=3)
        return query.flatten(2, 3), key.squeeze(3), value.squeeze(3)

    assert has_native_attention(*parts(mixed), "auto") and not has_native_attention(*parts(mixed), "reference")
    found, expected = causal_attention(*parts(mixed)), formula(*parts(exact))
    torch.testing.assert_close(found.double(), expected, atol=BOUND, rtol=BOUND)
    given = torch.randn(expected.shape, generator=random)
    found.backward(given)
    expected.backward(given.double())
    scale = exact.grad.abs().max().item()
    torch.testing.assert_close(mixed.grad.double(), exact.grad, atol=scale * BOUND, rtol=BOUND)


def test_native_attention_is_equal_for_any_threads_and_batch() -> None:
    """The bits of a head do not depend on the number of threads, the batch or the other heads."""
    query, key, value = (torch.randn(130, 3, 4, 16).requires_grad_() for _ in range(3))
    given = torch.randn(130, 3, 64)

    def results(pick: slice, heads: slice) -> list[Tensor]:
        own = [x[:, pick, heads] for x in (query, key, value)]
        out = causal_attention(*own)
        mine = given.unflatten(-1, (4, 16))[:, pick, heads].flatten(2)
        return [out.unflatten(-1, (-1, 16)), *torch.autograd.grad(out, own, mine)]

    threads, everything = torch.get_num_threads(), results(slice(None), slice(None))
    try:
        torch.set_num_threads(2)
        assert all(map(torch.equal, results(slice(None), slice(None)), everything))
    finally:
        torch.set_num_threads(threads)
    part = results(slice(1, 2), slice(2, 4))
    assert all(torch.equal(own, each[:, 1:2, 2:4]) for own, each in zip(part, everything, strict=True))


def test_shared_keys_have_equal_gradients_for_any_threads_and_batch() -> None:
    """With one group of keys, heads are divided over threads; their gradients are added in the order of heads."""
    query, key, value = torch.randn(130, 2, 5, 24), torch.randn(130, 2, 1, 24), torch.randn(130, 2, 1, 24)
    given, threads = torch.randn(130, 2, 120), torch.get_num_threads()

    def results(samples: slice) -> list[Tensor]:
        own = [x[:, samples].requires_grad_() for x in (query, key, value)]
        out = causal_attention(*own)
        return [out, *torch.autograd.grad(out, own, given[:, samples])]

    try:
        torch.set_num_threads(1)
        expected = results(slice(None))
        for count in (2, 3, 8):
            torch.set_num_threads(count)
            assert all(map(torch.equal, results(slice(None)), expected)), count
            alone = results(slice(1, 2))
            assert all(torch.equal(own, each[:, 1:]) for own, each in zip(alone, expected, strict=True)), count
    finally:
        torch.set_num_threads(threads)


def test_other_cases_have_no_kernel() -> None:
    """float64, 16 bits, widths that do not fit vectors, and values of another width use torch's attention."""
    x = torch.randn(4, 1, 2, 16)
    assert has_native_attention(x, x, x, "auto")
    assert not has_native_attention(x.double(), x.double(), x.double(), "auto")
    assert not has_native_attention(x.bfloat16(), x.bfloat16(), x.bfloat16(), "auto")
    assert not has_native_attention(x[..., :12], x[..., :12], x[..., :12], "auto")
    assert not has_native_attention(x, x, x[..., :8], "auto")
    assert not has_native_attention(x, x[:2], x[:2], "auto")


def test_weights_of_large_scores_have_the_sum_1() -> None:
    """Scores of 1e5 to 1e6, which float32 holds exactly; the two keys of a pair are equal and share their weight."""
    generator = torch.Generator().manual_seed(5)
    query, key = (torch.randint(-300, 300, (32, 1, 2, 64), generator=generator).float() for _ in range(2))
    key[1::2] = key[::2]
    value = torch.randn(32, 1, 2, 64, generator=generator)
    dout = torch.randn(32, 1, 128, generator=generator)
    leaves = [each.requires_grad_() for each in (query, key, value)]
    found = torch.autograd.grad(causal_attention(*leaves), leaves[2], dout)[0]
    wide = [each.detach().double().permute(1, 2, 0, 3) for each in leaves]
    hidden = torch.ones(32, 32, dtype=torch.bool).triu(1)
    weights = (wide[0] @ wide[1].mT / 8).masked_fill(hidden, float("-inf")).softmax(-1)
    expected = weights.mT @ dout.double().unflatten(-1, (2, 64)).permute(1, 2, 0, 3)
    torch.testing.assert_close(found.double(), expected.permute(2, 0, 1, 3), rtol=0, atol=1e-5)
