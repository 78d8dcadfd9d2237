"""Dropout masks are functions of what they fall on."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_core.errors import ConfigError
from megatron_core.tensor_parallel import KeyedDropout

SAMPLES, LENGTH, CHANNELS = 4, 64, 64


def _coordinates(samples: range, positions: range, channels: range) -> tuple[Tensor, Tensor, Tensor]:
    """For a tensor ``[s, b, h]``."""
    return (
        torch.tensor(samples)[None, :, None],
        torch.tensor(positions)[:, None, None],
        torch.tensor(channels),
    )


WHOLE = _coordinates(range(SAMPLES), range(LENGTH), range(CHANNELS))


def _keep(seed: int = 1, place: str = "layers.0.mlp", p: float = 0.5, coordinates=WHOLE) -> Tensor:
    return KeyedDropout(p, seed, place).keep(coordinates)


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_rate_and_scale(p: float) -> None:
    """The kept share is 1 - p within 5 standard deviations, and what is kept is divided by it."""
    out = KeyedDropout(p, 1, "x")(torch.ones(LENGTH, SAMPLES, CHANNELS), WHOLE)
    kept = out != 0
    deviation = (p * (1 - p) / kept.numel()) ** 0.5
    assert abs(kept.double().mean() - (1 - p)) < 5 * deviation
    torch.testing.assert_close(out[kept], torch.full_like(out[kept], 1 / (1 - p)))


def test_every_shard_has_its_part_of_the_same_mask() -> None:  # C26 C27
    whole = _keep()
    halves = [range(0, LENGTH // 2), range(LENGTH // 2, LENGTH)]
    by_position = [_keep(coordinates=_coordinates(range(SAMPLES), half, range(CHANNELS))) for half in halves]
    assert torch.equal(torch.cat(by_position), whole)
    by_channel = [_keep(coordinates=_coordinates(range(SAMPLES), range(LENGTH), half)) for half in halves]
    assert torch.equal(torch.cat(by_channel, dim=-1), whole)
    for sample in range(SAMPLES):
        one = _keep(coordinates=_coordinates(range(sample, sample + 1), range(LENGTH), range(CHANNELS)))
        assert torch.equal(one[:, 0], whole[:, sample])


def test_masks_of_different_things_are_unrelated() -> None:
    """Another seed, place or sample agrees on about half of the elements, as coins do."""
    other_samples = _coordinates(range(SAMPLES, 2 * SAMPLES), range(LENGTH), range(CHANNELS))
    base = _keep()
    others = [_keep(seed=2), _keep(place="layers.1.mlp"), _keep(place="layers.0.attention")]
    others += [_keep(coordinates=other_samples), base.roll(1, 0), base.roll(1, 1), base.roll(1, 2)]
    deviation = 0.5 / base.numel() ** 0.5
    for other in others:
        assert abs((other == base).double().mean() - 0.5) < 5 * deviation
    for dim in range(3):  # no position, sample or channel is treated worse than others
        shares = base.double().flatten(0, 1).mean(0) if dim == 2 else base.double().transpose(0, dim).flatten(1).mean(1)
        assert (shares - 0.5).abs().max() < 6 * 0.5 / (base.numel() / len(shares)) ** 0.5


def test_no_generator_is_read() -> None:  # C28
    before = torch.get_rng_state()
    dropout = KeyedDropout(0.5, 1, "x")
    first = dropout(torch.ones(LENGTH, SAMPLES, CHANNELS), WHOLE)
    assert torch.equal(dropout(torch.ones(LENGTH, SAMPLES, CHANNELS), WHOLE), first)
    assert torch.equal(torch.get_rng_state(), before)


def test_gradient_goes_where_the_mask_lets_it() -> None:
    x = torch.ones(LENGTH, SAMPLES, CHANNELS, requires_grad=True)
    KeyedDropout(0.3, 1, "x")(x, WHOLE).sum().backward()
    torch.testing.assert_close(x.grad, _keep(place="x", p=0.3) / 0.7)


def test_sample_numbers_are_needed_when_something_is_dropped() -> None:
    dropout, x = KeyedDropout(0.1, 1, "x"), torch.ones(2, 2, 2)
    with pytest.raises(ConfigError, match="sample_index"):
        dropout(x, (None, torch.arange(2)))
    assert dropout.eval()(x, (None,)) is x
    assert KeyedDropout(0.0, 1, "x")(x, (None,)) is x


def test_large_coordinates() -> None:
    """Sample numbers beyond 32 bits are as good as others. # C46"""
    far = _coordinates(range(2**40, 2**40 + SAMPLES), range(LENGTH), range(CHANNELS))
    kept = _keep(coordinates=far)
    assert abs(kept.double().mean() - 0.5) < 0.02
    assert not torch.equal(kept, _keep())
