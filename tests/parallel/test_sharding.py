"""A ``ShardSpec`` says where every element is, and who owns it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from megatron_core.parallel.sharding import (
    ShardSpec,
    allocate,
    amend_spec,
    initialise,
    initialise_by_name,
    name_seed,
    replicated,
    spec_of,
    split,
    split_fused,
    split_qkv,
)
from tests.parallel.specs import ANY_SPLIT, fused_splits, numbered, padded_splits, plain_splits, qkv_splits

quick = settings(deadline=None, max_examples=60)


def local_numbers(spec: ShardSpec) -> np.ndarray:
    """What this rank holds of a tensor with the elements 1, 2, 3, ...; padding is 0."""
    local = torch.full(spec.local_shape, -1)
    spec.localise(torch.from_numpy(numbered(spec.global_shape)), local)
    return local.numpy()


@quick
@given(ANY_SPLIT)
def test_parts_hold_every_element_and_owners_hold_it_once(specs: list[ShardSpec]) -> None:
    held, owned = [], []
    for spec in specs:
        local = local_numbers(spec)
        held.append(local.ravel())
        rows = local if local.ndim else local[None]
        owned += [rows[first:last].ravel() for first, last in spec.owned_local()]
    everything = numbered(specs[0].global_shape).ravel()
    assert set(np.concatenate(held)) - {0} == set(everything)
    np.testing.assert_array_equal(np.sort(np.concatenate(owned)), everything)


@quick
@given(st.one_of(plain_splits(), fused_splits(), padded_splits()))
def test_ranges_partition_the_extent(specs: list[ShardSpec]) -> None:
    extent = specs[0].global_shape[specs[0].dim]
    pieces = sorted(piece for piece in (p for held in specs[0].ranges for p in held))
    assert [i for start, stop in pieces for i in range(start, stop)] == list(range(extent))
    assert len({spec.local_shape for spec in specs}) == 1
    assert not any(spec.has_shared_ranges or spec.shared_local() for spec in specs)


@quick
@given(st.one_of(plain_splits(), fused_splits(), qkv_splits(), padded_splits()))
def test_parts_put_back_are_the_whole(specs: list[ShardSpec]) -> None:
    full = torch.zeros(specs[0].global_shape, dtype=torch.int64)
    for spec in specs:
        local, at = torch.from_numpy(local_numbers(spec)), 0
        for start, stop in spec.local_ranges:
            full.narrow(spec.dim, start, stop - start).copy_(local.narrow(spec.dim, at, stop - start))
            at += stop - start
        assert not local.narrow(spec.dim, at, spec.padding).any(), "padding is not zero"
    np.testing.assert_array_equal(full.numpy(), numbered(specs[0].global_shape))


@quick
@given(qkv_splits())
def test_shared_rows_are_those_that_several_ranks_hold(specs: list[ShardSpec]) -> None:
    holders: dict[int, int] = {}
    for spec in specs:
        for start, stop in spec.local_ranges:
            holders |= {row: holders.get(row, 0) + 1 for row in range(start, stop)}
    for spec in specs:
        found = {row for _, (start, stop) in spec.shared_local() for row in range(start, stop)}
        mine = {row for start, stop in spec.local_ranges for row in range(start, stop)}
        assert found == {row for row in mine if holders[row] > 1}
        assert spec.has_shared_ranges == (max(holders.values()) > 1)
        for (first, last), (start, stop) in spec.shared_local():
            rows = local_numbers(spec).reshape(spec.local_shape[0], -1)[first:last]
            expected = numbered(spec.global_shape).reshape(spec.global_shape[0], -1)[start:stop]
            np.testing.assert_array_equal(rows, expected)


@pytest.mark.parametrize(("heads", "groups", "size"), [(8, 8, 4), (8, 4, 2), (8, 2, 4), (8, 1, 4), (8, 2, 8)])
def test_each_rank_has_its_heads_and_their_keys(heads: int, groups: int, size: int) -> None:  # C19 C42
    """Rank i has the query heads i n ... (i + 1) n - 1 in this order, and for each group of them its key and value."""
    each = heads // groups
    rows = [f"q{g * each + q}" if q < each else "kv"[q - each] + str(g) for g in range(groups) for q in range(each + 2)]
    for index in range(size):
        spec = split_qkv((len(rows), 3), heads, groups, 1, index, size)
        own = range(index * heads // size, (index + 1) * heads // size)
        expected = []
        for group in sorted({head // each for head in own}):
            expected += [f"q{head}" for head in own if head // each == group] + [f"k{group}", f"v{group}"]
        assert [rows[row] for start, stop in spec.local_ranges for row in range(start, stop)] == expected


def test_gate_and_up_are_split_each_on_its_own() -> None:  # C42
    spec = split_fused((8,), (4, 4), 1, 2)
    assert spec.local_ranges == ((2, 4), (6, 8))


def test_rank_with_padding_alone() -> None:  # C21
    specs = [split((9, 2), 0, i, 4, padded=16) for i in range(4)]
    assert [spec.local_shape for spec in specs] == [(4, 2)] * 4
    assert [spec.padding for spec in specs] == [0, 0, 3, 4]
    assert specs[3].local_ranges == () and specs[3].owned_local() == []


def test_copy_of_a_tied_tensor_owns_nothing() -> None:  # C13
    for spec in (split((8, 2), 0, 0, 2), split((8, 2), 1, 0, 2), replicated((3,))):
        assert spec.owned_local()
        assert replace(spec, is_copy=True).owned_local() == []


def test_scalar_is_owned_by_the_first_rank() -> None:
    assert replicated((), 0).owned_local() == [(0, 1)]
    assert replicated((), 1).owned_local() == []


def test_parameter_carries_its_spec() -> None:
    spec = split((8, 2), 0, 1, 2)
    parameter = allocate(spec, torch.float64, "cpu")
    assert spec_of(parameter) is spec
    assert (parameter.shape, parameter.dtype) == ((4, 2), torch.float64)
    amend_spec(parameter, tied=True)
    assert spec_of(parameter) == replace(spec, tied=True)
    assert spec_of(nn.Parameter(torch.zeros(2, 3))) == replicated((2, 3))


def test_parts_are_drawn_from_one_tensor() -> None:
    """Initial weights are a function of (seed, name), whatever the split, and move no other generator."""
    drawn = []
    for size in (1, 2, 4):
        parts = [allocate(split((8, 3), 0, i, size), torch.float64, "cpu") for i in range(size)]
        before = torch.get_rng_state()
        for part in parts:
            initialise_by_name(part, nn.init.normal_, 1, "decoder.weight")
        assert torch.equal(torch.get_rng_state(), before)
        drawn.append(torch.cat([part.data for part in parts]))
    assert torch.equal(drawn[0], drawn[1]) and torch.equal(drawn[0], drawn[2])
    torch.manual_seed(name_seed(1, "decoder.weight"))
    whole = allocate(replicated((8, 3)), torch.float32, "cpu")
    initialise(whole, nn.init.normal_)
    assert torch.equal(whole.double(), drawn[0])


def test_name_seeds_differ() -> None:
    seeds = [name_seed(seed, name) for seed in (1, 2, 12) for name in ("a", "b", "2:a")]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
