"""Hashes of tensors: every change of bits or places affects them, and no division into parts does."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
import torch

from megatron_core.parallel.boxes import Box, flat_boxes
from megatron_core.reports import hash_sums as module
from megatron_core.reports.hash_sums import box_sum, combined, finished, tensor_hash

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> torch.Tensor:
    return (100 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_flipped_bit_changes_it(dtype: torch.dtype) -> None:
    first, width = random(3, 5, dtype=dtype), 8 * dtype.itemsize
    found = {tensor_hash(first)}
    for element, bit in product(range(first.numel()), range(width)):
        changed = first.clone()
        changed.view(-1).view(BITS[dtype.itemsize])[element] ^= -(2**bit) if bit == width - 1 else 2**bit
        found.add(tensor_hash(changed))
    assert len(found) == first.numel() * width + 1


def test_many_random_changes() -> None:
    """Flipped bits in several elements, exchanged elements, rows, columns and blocks, and shifts, of one tensor."""
    first, draw = random(24, 40), torch.Generator().manual_seed(2)
    found, changes = {tensor_hash(first)}, set[bytes]()

    def numbers(high: int, count: int) -> list[int]:
        return torch.randperm(high, generator=draw)[:count].tolist()

    for number in range(2400):
        x = first.clone()
        kind = number % 6
        if kind == 0:  # the same bit of two to five elements, the highest one included
            bit = numbers(32, 1)[0]
            x.view(-1).view(torch.int32)[numbers(x.numel(), 2 + number % 4)] ^= -(2**31) if bit == 31 else 2**bit
        elif kind == 1:
            a, b = numbers(x.numel(), 2)
            x.view(-1)[[a, b]] = x.view(-1)[[b, a]]
        elif kind == 2:
            a, b = numbers(24, 2)
            x[[a, b]] = x[[b, a]]
        elif kind == 3:
            a, b = numbers(40, 2)
            x[:, [a, b]] = x[:, [b, a]]
        elif kind == 4:  # the signs of a rectangle
            rows, columns = numbers(24, 2), numbers(40, 2)
            x[torch.tensor(rows)[:, None], torch.tensor(columns)] *= -1
        else:
            x = x.roll(1 + numbers(900, 1)[0])
        if x.numpy().tobytes() != first.numpy().tobytes():
            changes.add(x.numpy().tobytes())
            found.add(tensor_hash(x))
    assert len(changes) > 2000 and len(found) == len(changes) + 1


@pytest.mark.parametrize("shape", [(), (7,), (6, 10), (3, 4, 5), (2, 3, 4, 5)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_sums_of_boxes_are_the_sum(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = random(*shape, dtype=dtype)
    cuts = [sorted({0, 1, size // 2, size}) for size in shape]
    boxes = [Box(tuple(a for a, _ in c), tuple(b for _, b in c)) for c in product(*[pairwise(k) for k in cuts])]
    total = sum(int(box_sum(x[box.index], box, shape)) for box in boxes)
    flat = 0
    middle = x.numel() // 3
    for start, stop in ((0, middle), (middle, x.numel())) if middle else ((0, x.numel()),):
        for box, at in flat_boxes(shape, start, stop):
            flat += int(box_sum(x.view(-1)[at : at + box.numel].view(box.shape), box, shape))
    assert finished(total, shape, dtype) == finished(flat, shape, dtype) == tensor_hash(x)


def test_long_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows, columns and indices than are processed at a time or have stored factors."""
    tensors = [random(70_000), random(300, 3), random(3, 70_000)]
    expected = [tensor_hash(x) for x in tensors]
    monkeypatch.setattr(module, "CHUNK", 64)
    monkeypatch.setattr(module, "_TABLE", 100)
    assert [tensor_hash(x) for x in tensors] == expected


def test_shape_dtype_and_special_values_count() -> None:
    zeros = torch.zeros(4, 6)
    variants = [zeros, zeros.view(6, 4), zeros.view(24), zeros.bfloat16(), zeros.double(), -zeros, zeros + torch.nan]
    assert len({tensor_hash(x) for x in variants}) == len(variants)
    assert tensor_hash(zeros + torch.nan) == tensor_hash(zeros + torch.nan)


def test_values_stay_the_same_in_all_versions() -> None:
    """Records of different machines and versions are compared."""
    assert tensor_hash(torch.arange(12.0).view(3, 4)) == "9335ea5ac79d24eb"


def test_combination_depends_on_names_and_not_on_the_order() -> None:
    pairs = [("a", "01"), ("b", "02")]
    assert combined(pairs) == combined(reversed(pairs))
    assert len({combined(p) for p in (pairs, [("a", "02"), ("b", "01")], pairs[:1], [("a", "01"), ("c", "02")])}) == 4
