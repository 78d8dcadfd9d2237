"""Weights and prefixes, and the order in which data sets alternate."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_core.datasets import BlendedDataset, KeyedGPTDataset, parse_blend
from megatron_core.datasets.blend import PERIOD, _period, slots
from megatron_core.errors import ConfigError
from tests.datasets.files import FakeIndexed


def parts(*lengths: int) -> list[KeyedGPTDataset]:
    """Data sets with these numbers of tokens, one per sample."""
    return [KeyedGPTDataset(FakeIndexed([length]), range(1), 1, seed=0) for length in lengths]


@pytest.mark.parametrize(
    ("data_path", "weights", "prefixes"),
    [
        (["a"], None, ("a",)),
        (["5"], None, ("5",)),
        (["a", "b"], None, ("a", "b")),
        (["a", "b", "c"], None, ("a", "b", "c")),
        (["0.3", "a", "0.7", " b "], (0.3, 0.7), ("a", "b")),
        (["30", "a", "1e2", "b"], (30.0, 100.0), ("a", "b")),
        (["2", "a"], (2.0,), ("a",)),
        (["a", "1", "b", "2"], None, ("a", "1", "b", "2")),
    ],
)
def test_parse(data_path: list[str], weights: tuple[float, ...] | None, prefixes: tuple[str, ...]) -> None:
    assert parse_blend(data_path) == (weights, prefixes)


@pytest.mark.parametrize(
    ("data_path", "sentence"),
    [
        (["0.3", "a", "b", "c"], "only some prefixes have a weight"),
        (["0.3", "a", "0.7"], "only some prefixes have a weight"),
        (["0", "a", "1", "b"], "weights must be numbers > 0"),
        (["-1", "a"], "weights must be numbers > 0"),
        (["inf", "a", "1", "b"], "weights must be numbers > 0"),
        (["nan", "a", "1", "b"], "weights must be numbers > 0"),
    ],
)
def test_parse_refuses(data_path: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=f"--data-path {' '.join(data_path)}: .*{sentence}"):
        parse_blend(data_path)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=40))
def test_slots(weights: list[float]) -> None:
    counts = slots(weights)
    assert sum(counts) == PERIOD and min(counts) >= 1
    exact = np.array(weights) / np.sum(weights) * PERIOD
    raised = sum(share < 1 for share in exact)
    assert np.abs(np.array(counts) - exact).max() <= 1 + raised


def test_shares_hold_from_the_first_samples_on() -> None:
    blend = BlendedDataset(parts(9, 9, 9), [0.5, 0.3, 0.2])
    for count in (10, 100, 1000, PERIOD, PERIOD + 777):
        found = Counter(blend.locate(i)[0] for i in range(count))
        for dataset, share in enumerate([0.5, 0.3, 0.2]):
            assert abs(found[dataset] - share * count) <= 2


def test_each_data_set_is_read_in_its_own_order_without_gaps() -> None:
    blend = BlendedDataset(parts(9, 9), [0.9, 0.1])
    found: dict[int, list[int]] = {0: [], 1: []}
    for i in range(PERIOD + 5000):
        dataset, item = blend.locate(i)
        found[dataset].append(item)
    assert all(items == list(range(len(items))) for items in found.values())


def test_the_place_is_a_pure_function() -> None:
    places = [5, 0, 3 * PERIOD + 17, 5]
    first = [BlendedDataset(parts(9, 9), [2, 1]).locate(i) for i in places]
    blend = BlendedDataset(parts(9, 9), [2, 1])
    assert [blend.locate(i) for i in places] == first  # C30
    assert first[0] == first[3]


def test_far_places_do_not_overflow() -> None:
    blend = BlendedDataset(parts(9, 9), [1, 1])
    index = 2**40 * PERIOD + 1
    assert blend.locate(index) == (1, 2**40 * PERIOD // 2)  # C46


def test_without_weights_sizes_count() -> None:
    blend = BlendedDataset(parts(301, 101), None)
    assert blend.slots == (PERIOD * 3 // 4, PERIOD // 4)
    assert blend.samples_per_epoch == 400
    assert Counter(blend.locate(i)[0] for i in range(400)) == {0: 300, 1: 100}


def test_items_are_those_of_the_data_sets() -> None:
    both = parts(50, 70)
    blend = BlendedDataset(both, [1, 2])
    for i in range(200):
        dataset, item = blend.locate(i)
        np.testing.assert_equal(blend[i], both[dataset][item])


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="2 data sets has 1 weights"):
        BlendedDataset(parts(9, 9), [1])
    with pytest.raises(ConfigError, match="a blend of 0 data sets"):
        BlendedDataset([], None)
    with pytest.raises(IndexError):
        BlendedDataset(parts(9, 9), None).locate(-1)


def test_items_lie_in_the_middle_of_their_stretches() -> None:
    """Item k of n is at (k + 1/2) / n, so that a rare data set comes neither first nor last."""
    datasets, items = _period((4, 2, 1))
    assert datasets.tolist() == [0, 1, 0, 2, 0, 1, 0]
    assert items.tolist() == [0, 0, 1, 0, 2, 1, 3]
