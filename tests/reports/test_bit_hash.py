"""Hashes of bits: changes that must affect them, and changes that must not."""

from __future__ import annotations

import pytest
import torch

from megatron_core.reports.hash_sums import CHUNK, bit_hash


def _hash(tensor: torch.Tensor) -> int:
    return bit_hash(tensor).item()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.uint8])
def test_one_bit_changes_it(dtype: torch.dtype) -> None:
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    first = (torch.arange(35).reshape(5, 7) % 11).to(dtype)
    width = 8 * first.element_size()
    changed = first.repeat(width, 1, 1)
    for bit in range(width):
        changed[bit].view(bits[first.element_size()])[3, 2] ^= -(2**bit) if bit == width - 1 else 2**bit
    assert len({_hash(tensor) for tensor in (first, *changed)}) == width + 1


@pytest.mark.parametrize("distance", [1, 5, CHUNK, CHUNK + 3])
def test_places_count(distance: int) -> None:
    """Within a chunk and between chunks."""
    first = torch.randn(2 * CHUNK + 17, generator=torch.Generator().manual_seed(3))
    second = first.clone()
    second[[2, 2 + distance]] = first[[2 + distance, 2]]
    assert _hash(second) != _hash(first)
    assert _hash(first.roll(CHUNK)) != _hash(first)


def test_signs_of_two_elements() -> None:
    """Only the highest bits, which a sum of 64-bit words could not detect."""
    for dtype in (torch.float64, torch.float32):
        first = torch.arange(1, 9, dtype=dtype)
        second = first.clone()
        second[[1, 4]] *= -1.0
        assert _hash(second) != _hash(first)


def test_nan_and_zeros_are_bits() -> None:
    nan = torch.full((3,), torch.nan)
    assert _hash(nan) == _hash(nan.clone())
    assert _hash(torch.tensor([-0.0])) != _hash(torch.tensor([0.0]))


def test_only_bits_and_their_order_count() -> None:
    matrix = torch.randn(6, 4)
    state = torch.get_rng_state()
    assert _hash(matrix.t()) == _hash(matrix.t().contiguous()) != _hash(matrix)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_hash_is_of_one_tensor() -> None:
    hashes = [bit_hash(tensor) for tensor in (torch.ones(3), torch.zeros(0), torch.ones(()), torch.ones(3))]
    assert all(each.dtype == torch.int64 and each.shape == () for each in hashes)
    assert hashes[0] == hashes[3] != hashes[2]
