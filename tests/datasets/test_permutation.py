"""The computed shuffle: a bijection for every size and key, and a pure function."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_core.datasets import KeyedPermutation, mix64

KEYS = st.tuples(st.integers(-(2**70), 2**70), st.integers(0, 2**40))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 16, 17, 99, 100, 101, 1000])
def test_bijection(size: int) -> None:
    for seed in range(3):
        permutation = KeyedPermutation(size, (seed, 0))
        assert sorted(permutation[i] for i in range(size)) == list(range(size))
        assert len(permutation) == size


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 700), KEYS)
def test_bijection_for_any_size_and_key(size: int, key: tuple[int, int]) -> None:
    permutation = KeyedPermutation(size, key)
    assert {permutation[i] for i in range(size)} == set(range(size))


@settings(max_examples=30, deadline=None)
@given(st.integers(2**31, 2**62), st.integers(0, 2**31), KEYS)
def test_large_sizes_do_not_collide(size: int, first: int, key: tuple[int, int]) -> None:
    permutation = KeyedPermutation(size, key)
    images = [permutation[i] for i in range(first % size, min(size, first % size + 200))]
    assert len(set(images)) == len(images)  # C46
    assert all(0 <= image < size for image in images)


def test_epochs_and_seeds_give_other_orders() -> None:
    orders = {tuple(KeyedPermutation(50, key)) for key in [(0, 0), (0, 1), (1, 0), (1, 1), (0, 0, 0), (0,)]}
    assert len(orders) == 6


def test_places_are_well_spread() -> None:
    """Mean and correlation with the position, of 20,000 numbers: within five standard deviations of a random order."""
    size = 20_000
    order = np.array([*KeyedPermutation(size, (3, 1))], dtype=np.float64)
    correlation = np.corrcoef(np.arange(size), order)[0, 1]
    assert abs(correlation) < 5 / size**0.5
    neighbours = np.corrcoef(order[:-1], order[1:])[0, 1]
    assert abs(neighbours) < 5 / size**0.5
    assert abs(order[: size // 10].mean() / size - 0.5) < 5 * (1 / 12 / (size // 10)) ** 0.5


def test_no_fixed_point_stays_for_all_keys() -> None:
    """In an order of four, each number comes first for about a quarter of the keys."""
    first = np.bincount([KeyedPermutation(4, (seed,))[0] for seed in range(2000)], minlength=4)
    assert first.min() > 400 and first.max() < 600


def test_bounds() -> None:
    permutation = KeyedPermutation(5, (0,))
    for position in (-1, 5):
        with pytest.raises(IndexError):
            permutation[position]
    with pytest.raises(ValueError):
        KeyedPermutation(0, (0,))


def test_mix64() -> None:
    assert mix64(1, 2) == mix64(1, 2)
    assert mix64(-1) == mix64(2**64 - 1)
    hashes = {mix64(a, b) for a in range(100) for b in range(100)} | {mix64(a) for a in range(100)} | {mix64()}
    assert len(hashes) == 10_101 and all(0 <= value < 2**64 for value in hashes)
    bits = np.unpackbits(np.array([mix64(i) for i in range(4000)], dtype="<u8").view(np.uint8)).reshape(-1, 64)
    assert np.abs(bits.mean(axis=0) - 0.5).max() < 0.05


def test_the_order_never_changes() -> None:
    """Runs resume across releases: these numbers define the data order."""
    assert list(KeyedPermutation(10, (1234, 0))) == [2, 9, 7, 1, 4, 3, 0, 8, 5, 6]
    assert mix64(1234, 0) == 10052871970936996279
