"""Dropout masks are functions of an element's coordinates."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from megatron_core.errors import ConfigError
from megatron_core.tensor_parallel import KeyedDropout

SAMPLES, LENGTH, CHANNELS = 4, 64, 64
EVERYONE = torch.arange(SAMPLES)
BACKENDS = pytest.mark.parametrize("backend", ["auto", "reference"])


def _keep(
    seed: int = 1,
    place: str = "layers.0.mlp",
    p: float = 0.5,
    samples: Tensor = EVERYONE,
    positions: Sequence[int] = range(LENGTH),
    backend: str = "auto",
) -> Tensor:
    """Memory positions of a tensor ``[s, b, h]``."""
    ones = torch.ones(len(positions), len(samples), CHANNELS)
    return KeyedDropout(p, seed, place, backend)(ones, samples, position_ids=torch.tensor(positions)) != 0


@BACKENDS
@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_rate_and_scale(p: float, backend: str) -> None:
    """The share of kept elements is 1 - p within 5 standard deviations, and kept elements are divided by it."""
    out = KeyedDropout(p, 1, "x", backend)(torch.ones(LENGTH, SAMPLES, CHANNELS), EVERYONE)
    kept = out != 0
    deviation = (p * (1 - p) / kept.numel()) ** 0.5
    assert abs(kept.double().mean() - (1 - p)) < 5 * deviation
    torch.testing.assert_close(out[kept], torch.full_like(out[kept], 1 / (1 - p)), rtol=1e-4, atol=0)


@BACKENDS
def test_every_shard_has_its_part_of_the_same_mask(backend: str) -> None:  # C26 C27
    whole = _keep(backend=backend)
    halves = [range(0, LENGTH // 2), range(LENGTH // 2, LENGTH)]
    by_position = [_keep(positions=half, backend=backend) for half in halves]
    assert torch.equal(torch.cat(by_position), whole)
    order = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(1)).tolist()
    assert torch.equal(_keep(positions=order, backend=backend), whole[order])
    for sample in range(SAMPLES):
        one = _keep(samples=EVERYONE[sample : sample + 1], backend=backend)
        assert torch.equal(one[:, 0], whole[:, sample])


def test_every_rank_has_the_masks_of_its_heads() -> None:  # C27
    weights = torch.ones(SAMPLES, 8, 16, 16)
    dropout = KeyedDropout(0.5, 1, "x")
    whole = dropout(weights, EVERYONE)
    parts = [dropout(weights[:, first : first + 4], EVERYONE, first_head=first) for first in (0, 4)]
    assert torch.equal(torch.cat(parts, dim=1), whole)
    assert not torch.equal(*parts)


def test_masks_of_different_things_are_unrelated() -> None:
    """Masks of another seed, module or sample agree on about half of the elements."""
    base = _keep()
    others = [_keep(seed=2), _keep(place="layers.1.mlp"), _keep(place="layers.0.attention")]
    others += [_keep(samples=EVERYONE + SAMPLES), base.roll(1, 0), base.roll(1, 1), base.roll(1, 2)]
    deviation = 0.5 / base.numel() ** 0.5
    for other in others:
        assert abs((other == base).double().mean() - 0.5) < 5 * deviation
    for dim in range(3):  # all positions, samples and channels have equal probabilities
        shares = base.double().flatten(0, 1).mean(0) if dim == 2 else base.double().transpose(0, dim).flatten(1).mean(1)
        assert (shares - 0.5).abs().max() < 6 * 0.5 / (base.numel() / len(shares)) ** 0.5


def test_no_generator_is_read() -> None:  # C28
    before = torch.get_rng_state()
    dropout = KeyedDropout(0.5, 1, "x")
    first = dropout(torch.ones(LENGTH, SAMPLES, CHANNELS), EVERYONE)
    assert torch.equal(dropout(torch.ones(LENGTH, SAMPLES, CHANNELS), EVERYONE), first)
    assert torch.equal(torch.get_rng_state(), before)


@BACKENDS
def test_gradient_goes_where_the_mask_lets_it(backend: str) -> None:
    x = torch.ones(LENGTH, SAMPLES, CHANNELS, requires_grad=True)
    KeyedDropout(0.3, 1, "x", backend)(x, EVERYONE).sum().backward()
    torch.testing.assert_close(x.grad, _keep(place="x", p=0.3) / 0.7, rtol=1e-4, atol=0)


def test_bias_and_residual_are_added_whether_or_not_something_is_dropped() -> None:
    x, residual = torch.randn(LENGTH, SAMPLES, CHANNELS), torch.randn(LENGTH, SAMPLES, CHANNELS)
    bias, dropout = torch.randn(CHANNELS), KeyedDropout(0.3, 1, "x")
    added = dropout(x, EVERYONE, bias=bias, residual=residual)
    torch.testing.assert_close(added, residual + _keep(place="x", p=0.3) * (x + bias) / 0.7, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(dropout.eval()(x, None, bias=bias, residual=residual), residual + x + bias)
    assert torch.equal(dropout(x, None, residual=residual), residual + x)


def test_sample_numbers_are_needed_when_something_is_dropped() -> None:
    dropout, x = KeyedDropout(0.1, 1, "x"), torch.ones(2, 2, 2)
    with pytest.raises(ConfigError, match="sample_index"):
        dropout(x, None)
    assert dropout.eval()(x, None) is x
    assert KeyedDropout(0.0, 1, "x")(x, None) is x


def test_large_coordinates() -> None:
    """Sample numbers beyond 32 bits work like others. # C46"""
    kept = _keep(samples=EVERYONE + 2**40)
    assert abs(kept.double().mean() - 0.5) < 0.02
    assert not torch.equal(kept, _keep())
