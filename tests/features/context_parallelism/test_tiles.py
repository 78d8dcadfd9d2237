"""Tiles contain every visible pair of query and key once; and the work of each rank."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from megatron_core.errors import LayoutError
from megatron_core.features.context_parallelism.products import visible_keys
from megatron_core.features.context_parallelism.tiles import LEAST_BAND, Tile, tiles
from megatron_core.parallel.micro_batch import SequenceSplit, zigzag


def lengths_of(total: int, seed: int) -> tuple[int, ...]:
    """Documents of any lengths, many of one token, that fill ``total``."""
    choose, lengths = random.Random(seed), []
    while sum(lengths) < total:
        lengths.append(min(choose.choice((1, 1, 2, 5, total // 3, total)), total - sum(lengths)))
    return tuple(lengths)


def seen(length: int, documents: tuple[tuple[int, ...], ...] | None, window: int | None) -> Tensor:
    """``[b, s, s]``: the definition."""
    positions = torch.arange(length)
    distance = positions[:, None] - positions
    causal = (distance >= 0) & (distance < (window or length))
    if documents is None:
        return causal[None]
    numbers = torch.stack([torch.repeat_interleave(torch.arange(len(own)), torch.tensor(own)) for own in documents])
    return causal & (numbers[:, :, None] == numbers[:, None, :])


def counted(tile: Tile, positions: tuple[Tensor, Tensor], into: Tensor) -> None:
    """Add 1 for each pair of the tile at its global position."""
    queries, keys = positions[0][slice(*tile.queries)], positions[1][slice(*tile.keys)]
    shown = torch.ones(len(queries), len(keys), dtype=torch.bool)
    if tile.band is not None:
        shown = visible_keys(tile, torch.device("cpu"))
    assert shown.any(1).all(), "a query without a key has no log-sum-exp"
    assert tile.pairs == shown.sum()
    if tile.is_causal_square:
        assert torch.equal(shown, torch.ones_like(shown).tril())
    rows = range(len(into)) if tile.row is None else [tile.row]
    for row in rows:
        into[row, queries[:, None], keys] += shown.long()


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("window", [None, 1, 3, 7, 130, 1000])
@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_each_pair_that_is_seen_is_computed_once(size: int, window: int | None, seed: int | None) -> None:  # C45
    length = 24 if window is None or window < LEAST_BAND else 600
    documents = None if seed is None else (lengths_of(length, seed), lengths_of(length, seed + 100))
    expected = seen(length, documents, window)
    found = torch.zeros_like(expected, dtype=torch.long)
    where = [SequenceSplit(cp_rank=rank, cp_size=size).positions(length) for rank in range(size)]
    for rank in range(size):
        for owner in range(size):
            for tile in tiles(zigzag(length, rank, size), zigzag(length, owner, size), documents, window):
                counted(tile, (where[rank], where[owner]), found)
    assert torch.equal(found, expected.long())


@pytest.mark.parametrize("size", [2, 4, 8])
def test_zigzag_gives_all_ranks_the_same_work(size: int) -> None:
    """max/mean of the pairs of a rank: 1, compared with 2 - 1/cp for contiguous parts (up to the diagonals)."""
    length = 512 * size

    def imbalance(parts: list[tuple[tuple[int, int], ...]]) -> float:
        work = [sum(tile.pairs for keys in parts for tile in tiles(queries, keys)) for queries in parts]
        assert sum(work) == length * (length + 1) // 2
        return max(work) * size / sum(work)

    assert imbalance([zigzag(length, rank, size) for rank in range(size)]) == pytest.approx(1.0, abs=1e-12)
    part = length // size
    contiguous = imbalance([((rank * part, (rank + 1) * part),) for rank in range(size)])
    assert contiguous == pytest.approx(2 - 1 / size, rel=1e-2)
    if size == 8:  # ring-flash-attention's README: contiguous parts reach 53.9 % (H800) and 52.5 % (A100) of ideal
        assert 52.5 < 100 / contiguous < 53.9


@pytest.mark.parametrize("size", [2, 4])
def test_each_step_of_the_ring_is_one_product(size: int) -> None:
    """A triangle of the rank's own tokens, then rectangles of the same area."""
    length = 64 * size
    runs = [zigzag(length, rank, size) for rank in range(size)]
    for queries in runs:
        for keys in runs:
            (tile,) = tiles(queries, keys)
            assert tile.pairs == (64 * 65 // 2 if queries == keys else 64 * 32)


def test_tiles_of_a_window_are_as_small_as_it() -> None:
    found = tiles(((0, 4096),), ((0, 4096),), None, 256)
    assert max(tile.keys[1] - tile.keys[0] for tile in found) <= 512
    assert len(found) == 16


def test_lengths_that_cannot_be_cut() -> None:
    with pytest.raises(LayoutError, match=r"30 tokens cannot be cut into 2 x 4 chunks .* multiple of 8"):
        zigzag(30, 0, 4)
