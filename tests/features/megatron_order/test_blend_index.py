"""The order of a blend, compared with a plain loop."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_core.errors import ConfigError
from megatron_core.features.megatron_order import blend_index as module
from megatron_core.features.megatron_order.blend_index import (
    build_blend_index,
    build_exhaustive_blend_index,
    normalize,
    samples_per_dataset,
)
from tests.features.megatron_order import reference

WEIGHTS = st.lists(st.one_of(st.integers(1, 9).map(float), st.floats(1e-4, 1e3)), min_size=1, max_size=12)


@settings(max_examples=150, deadline=None)
@given(WEIGHTS, st.integers(0, 700), st.sampled_from([1, 3, 32, 512]), st.sampled_from([1, 64, 2**17]))
def test_a_blend_is_that_of_the_plain_loop(weights: list[float], size: int, chunk: int, batch: int) -> None:
    weights = normalize(weights)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNK", chunk)
        patch.setattr(module, "BATCH", batch)
        patch.setattr(module, "BLOCK", 100 * chunk)
        chosen, samples, counts = build_blend_index(weights, size)
    assert (chosen.dtype, samples.dtype) == (np.int16, np.int64)
    assert counts.tolist() == np.bincount(chosen, minlength=len(weights)).tolist()
    assert (chosen.tolist(), samples.tolist()) == reference.blend(weights, size)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 80), min_size=1, max_size=12).filter(any), st.sampled_from([1, 3, 32, 512]))
def test_an_exhaustive_blend_is_that_of_the_plain_loop(sizes: list[int], chunk: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNK", chunk)
        chosen, samples, counts = build_exhaustive_blend_index(sizes)
    assert (chosen.tolist(), samples.tolist()) == reference.exhaustive_blend(sizes)
    assert counts.tolist() == sizes


@pytest.mark.parametrize("weights", [[0.3, 0.7], [1.0, 1.0, 1.0], [1e-5, 1.0], list(np.linspace(1, 3, 300))])
def test_long_blends(weights: list[float]) -> None:
    weights = normalize(weights)
    size = 40_000 if len(weights) < 10 else 4_000
    chosen, samples, counts = build_blend_index(weights, size)
    expected = reference.blend(weights, size)
    assert chosen.tolist() == expected[0]
    assert samples.tolist() == expected[1]
    assert counts.sum() == size


def test_weights_of_another_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", 16)
    for weights in ([3.0, 7.0], [0.1, 0.2], [5.0, 0.0, 1e-9]):
        assert build_blend_index(weights, 300).dataset_index.tolist() == reference.blend(weights, 300)[0]


def test_the_largest_number_of_data_sets() -> None:
    number = 2**15 - 1
    chosen, samples, counts = build_blend_index([1 / number] * number, 100)
    assert chosen.tolist() == list(range(100))
    assert not samples.any() and counts.sum() == 100
    for many in (0, number + 1):
        with pytest.raises(ConfigError, match=f"a blend of {many} data sets; must be between 1 and 32,767"):
            build_blend_index([1.0] * many, 10)


def test_samples_asked_of_each_data_set() -> None:
    # ceil(1000 * 0.3) = 300 and ceil(300 * 1.005) = 302; ceil(1000 / 3) = 334 and ceil(335.67) = 336.
    assert samples_per_dataset(1000, normalize([3, 7])) == [300, 700]
    assert samples_per_dataset(1000, normalize([3, 7]), 0.005) == [302, 704]
    assert samples_per_dataset(1000, normalize([1, 1, 1])) == [334] * 3
    assert samples_per_dataset(1000, normalize([1, 1, 1]), 0.005) == [336] * 3
    assert samples_per_dataset(0, normalize([1, 1]), 0.005) == [0, 0]
