"""Checksums of transmitted tensors: hashes of bits, linear block sums and their bound, messages with a checksum."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_core.reports.hash_sums import bit_hash, hash_on_device
from megatron_core.resilience.links.checksums import (
    block_length,
    block_sums,
    differs,
    maxima,
    maximum_differs,
)
from megatron_core.resilience.links.faults import LinkFault, LinkFaults, damage_tensor
from megatron_core.resilience.links.recorder import is_message_intact, payload, sealed
from megatron_core.resilience.settings import LINK_DAMAGES

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("hashed", [bit_hash, hash_on_device])
@pytest.mark.parametrize("size", [0, 1, 7, 4096, 10_001])
def test_a_hash_changes_with_every_byte_and_with_their_order(hashed: object, size: int) -> None:
    data = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))
    hashes = [hashed(data)]
    for at in range(0, size, max(size // 9, 1)):
        changed = data.clone()
        changed[at] ^= 1
        hashes += [hashed(changed), hashed(changed.roll(1))]
    assert torch.equal(hashed(data.clone()), hashes[0])
    assert len({int(each) for each in hashes}) == len(hashes) - (2 if size == 1 else 0) // 2


def test_a_hash_leaves_storages_resizable() -> None:
    x = torch.ones(64)
    bit_hash(x)
    x.untyped_storage().resize_(0)
    assert x.untyped_storage().size() == 0


def _inputs(dtype: torch.dtype, ranks: int, size: int) -> list[Tensor]:
    random = torch.Generator().manual_seed(ranks)
    scales = torch.exp(torch.randn(size, generator=random))  # elements of very different sizes
    return [(torch.randn(size, generator=random) * scales).to(dtype) for _ in range(ranks)]


def _sum_in_turn(inputs: list[Tensor]) -> Tensor:
    """A sum that rounds after every addition, as a ring of gloo does."""
    total = inputs[0].clone()
    for each in inputs[1:]:
        total += each
    return total


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [2, 64])
def test_block_sums_of_a_sum_are_the_sums_of_block_sums(dtype: torch.dtype, ranks: int) -> None:
    inputs = _inputs(dtype, ranks, 3 * 5_000)
    expected = torch.stack([block_sums(each, 3) for each in inputs]).sum(0)
    found = block_sums(_sum_in_turn(inputs), 3)
    assert not differs(found, expected, dtype, ranks).any()
    # Parts have blocks of their own; their norms are those of the elements.
    alone = block_sums(_sum_in_turn(inputs)[5_000:10_000], 1)[0]
    torch.testing.assert_close(found[1], alone, rtol=1e-5, atol=1e-3)
    norms = [part.double().norm() for part in _sum_in_turn(inputs)[5_000:10_000].split(block_length(dtype))]
    torch.testing.assert_close(found[1, :, 1], torch.stack(norms), rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", LINK_DAMAGES)
def test_damaged_sums_differ(dtype: torch.dtype, kind: str) -> None:
    inputs = [torch.randn(5_000, generator=torch.Generator().manual_seed(rank)).to(dtype) for rank in range(2)]
    expected = torch.stack([block_sums(each, 1) for each in inputs]).sum(0)
    total = _sum_in_turn(inputs)
    assert damage_tensor(total, kind, inputs[0])
    assert differs(block_sums(total, 1), expected, dtype, 2).any()


def test_a_bit_of_the_largest_element_is_flipped() -> None:
    x = torch.tensor([1e-17, -3.0, 2.0], dtype=torch.float64)
    assert damage_tensor(x, "flipped") and x.tolist() == [1e-17, -6.0, 2.0]
    assert not damage_tensor(torch.zeros(4), "flipped"), "no element can be changed by more than rounding"


def test_integers_are_summed_exactly() -> None:
    inputs = [torch.randint(-(2**62), 2**62, (3_000,)) for _ in range(4)]
    expected = torch.stack([block_sums(each, 2) for each in inputs]).sum(0)
    total = torch.stack(inputs).sum(0)
    assert not differs(block_sums(total, 2), expected, torch.int64, 4).any()
    total[1_700] += 1
    assert differs(block_sums(total, 2), expected, torch.int64, 4).nonzero().tolist() == [[1, 0]]


def test_sums_that_overflow_have_no_bound_and_a_new_nan_is_wrong() -> None:
    big = torch.full((200,), 6e4, dtype=torch.float16)
    expected = 2 * block_sums(big, 1)
    assert not differs(block_sums(big + big, 1), expected, torch.float16, 2).any()
    small = torch.ones(200, dtype=torch.float16)
    spoiled = small + small
    spoiled[7] = torch.nan
    assert differs(block_sums(spoiled, 1), 2 * block_sums(small, 1), torch.float16, 2)[0].tolist() == [
        True, False, False, False,
    ]  # fmt: skip
    lost = torch.full((200,), torch.nan)
    assert not differs(block_sums(lost, 1), block_sums(lost, 1), torch.float32, 2).any()


def test_a_maximum_with_a_new_nan_is_wrong() -> None:
    """Also if the maximum is 0. A maximum of inputs with a NaN is not defined."""
    inputs = [torch.tensor([-3.0, 0.0, -torch.inf]), torch.tensor([-1.0, -2.0, -torch.inf])]
    expected = torch.stack([maxima(each, 3) for each in inputs]).amax(0)
    found = maxima(torch.maximum(*inputs), 3)
    assert not any(map(maximum_differs, found, expected))
    spoiled = maxima(torch.tensor([-1.0, torch.nan, -torch.inf]), 3)
    assert list(map(maximum_differs, spoiled, expected)) == [False, True, False]
    assert list(map(maximum_differs, found, spoiled)) == [False, False, False]
    whole = maxima(torch.tensor([3, 9, 4]), 1)[0]
    assert not maximum_differs(whole, maxima(torch.tensor([9, 9, 9]), 1)[0])
    assert maximum_differs(whole, maxima(torch.tensor([8, 2, 4]), 1)[0])


@pytest.mark.parametrize("kind", LINK_DAMAGES)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.uint8, torch.int64])
def test_a_message_shows_every_damage(kind: str, dtype: torch.dtype) -> None:
    before, x = (torch.randint(1, 100, (3, 7), dtype=torch.int64).to(dtype) for _ in range(2))
    message = sealed(x, 2)
    size = x.numel() * x.element_size()
    assert is_message_intact(message, size, 2)
    assert torch.equal(payload(message, (3, 7), dtype), x)
    assert damage_tensor(message, kind, sealed(before, 1))
    assert not is_message_intact(message, size, 2)


def test_previous_tensors_are_forgotten_once_no_fault_needs_them() -> None:
    faults = LinkFaults()
    faults.remembers = True
    data = torch.ones(16)
    faults.apply_to_message(0, 1, data)
    faults.arm(LinkFault("pp", "stale"))
    assert faults.disarm() == [LinkFault("pp", "stale")]
    faults.arm(LinkFault("pp", "stale"))
    faults.apply_to_message(0, 1, data.zero_())
    assert torch.equal(data, torch.ones(16))  # the previous one is still known after a step
    faults.remembers = False
    assert faults.disarm() == []
    faults.arm(LinkFault("pp", "stale"))
    faults.apply_to_message(0, 1, data.zero_())
    assert torch.equal(data, torch.zeros(16))
