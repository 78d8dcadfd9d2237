"""A ``ShardSpec`` gives the position and the owner of every element."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from megatron_core.errors import LayoutError
from megatron_core.parallel.boxes import Box
from megatron_core.parallel.sharding import (
    ShardSpec,
    Split,
    allocate,
    amend_spec,
    replicated,
    spec_of,
    split,
    split_fused,
    split_over,
    split_qkv,
)
from tests.parallel.specs import ANY_SPLIT, fused_splits, numbered, padded_splits, plain_splits, qkv_splits

quick = settings(deadline=None, max_examples=80)


def local_numbers(spec: ShardSpec) -> np.ndarray:
    """This rank's part of a tensor with the elements 1, 2, 3, ...; padding is 0."""
    local = torch.full(spec.local_shape, -1)
    spec.localise(torch.from_numpy(numbered(spec.global_shape)), local)
    return local.numpy()


def held_rows(spec: ShardSpec, dim: int = 0) -> list[int]:
    """The global rows of a rank, in local order."""
    return [row for part in spec.parts for row in range(part.whole.start[dim], part.whole.stop[dim])]


@quick
@given(ANY_SPLIT)
def test_parts_hold_every_element_and_owners_hold_it_once(specs: list[ShardSpec]) -> None:
    held, owned = [], []
    for spec in specs:
        local = local_numbers(spec).ravel()
        held.append(local)
        owned += [local[first:last] for first, last in spec.owned_flat_ranges()]
        assert not replace(spec, is_copy=True).owned_flat_ranges()  # C13
    everything = numbered(specs[0].global_shape).ravel()
    assert set(np.concatenate(held)) - {0} == set(everything)
    np.testing.assert_array_equal(np.sort(np.concatenate([np.zeros(0, int), *owned])), everything)


@quick
@given(ANY_SPLIT)
def test_parts_put_back_are_the_whole(specs: list[ShardSpec]) -> None:
    full = np.zeros(specs[0].global_shape, dtype=np.int64)
    for spec in specs:
        local, padding = local_numbers(spec), np.ones(spec.local_shape, dtype=bool)
        for part in spec.parts:
            full[part.whole.index] = local[part.local.index]
            padding[part.local.index] = False
        assert not local[padding].any(), "padding is not zero"
    np.testing.assert_array_equal(full, numbered(specs[0].global_shape))


CUT_SHARED_ROWS = [
    ShardSpec(
        (4,),
        (Split(0, "tp", (((0, 4),), ((0, 4),))), Split(0, "ep", (((0, 2),), ((2, 4),)))),
        (("tp", tp), ("ep", ep)),
    )
    for tp in range(2)
    for ep in range(2)
]
"""Rows that all ranks of tp share, and that ep cuts: few drawn examples have both."""


@quick
@given(ANY_SPLIT)
@example(CUT_SHARED_ROWS)
def test_ranks_of_an_axis_list_the_same_shared_ranges(specs: list[ShardSpec]) -> None:
    for number, split_ in enumerate(specs[0].splits):
        lists: dict[tuple, list] = {}
        for spec in specs:
            others = tuple(index for axis, index in spec.indices if axis != split_.axis)
            listed = spec.all_shared_ranges(spec.splits[number])
            assert lists.setdefault(others, listed) == listed
            assert {whole for _, whole in spec.shared_ranges(spec.splits[number])} <= set(listed)


@quick
@given(st.one_of(plain_splits(), fused_splits(), padded_splits()))
def test_even_splits_share_nothing(specs: list[ShardSpec]) -> None:
    assert len({spec.local_shape for spec in specs}) == 1
    assert not any(split.shared for spec in specs for split in spec.splits)
    assert sum(part.whole.numel for spec in specs for part in spec.parts) == np.prod(specs[0].global_shape)


@quick
@given(qkv_splits())
def test_shared_rows_are_those_that_several_ranks_hold(specs: list[ShardSpec]) -> None:
    holders = np.bincount([row for spec in specs for row in held_rows(spec)])
    for spec in specs:
        (over_tp,) = spec.splits
        found = {row for _, (start, stop) in spec.shared_ranges(over_tp) for row in range(start, stop)}
        assert found == {row for row in held_rows(spec) if holders[row] > 1}
        assert bool(over_tp.shared) == (max(holders) > 1)
        for (first, last), (start, stop) in spec.shared_ranges(over_tp):
            np.testing.assert_array_equal(local_numbers(spec)[first:last], numbered(spec.global_shape)[start:stop])


@pytest.mark.parametrize(("heads", "groups", "size"), [(8, 8, 4), (8, 4, 2), (8, 2, 4), (8, 1, 4), (8, 2, 8)])
def test_each_rank_has_its_heads_and_their_keys(heads: int, groups: int, size: int) -> None:  # C19 C42
    """Rank i has the query heads i n ... (i + 1) n - 1 in this order, and for each of their groups its key and
    value."""
    each = heads // groups
    rows = [f"q{g * each + q}" if q < each else "kv"[q - each] + str(g) for g in range(groups) for q in range(each + 2)]
    for index in range(size):
        spec = split_qkv((len(rows), 3), heads, groups, 1, index, size)
        own = range(index * heads // size, (index + 1) * heads // size)
        expected = []
        for group in sorted({head // each for head in own}):
            expected += [f"q{head}" for head in own if head // each == group] + [f"k{group}", f"v{group}"]
        assert [rows[row] for row in held_rows(spec)] == expected


def test_gate_and_up_are_split_each_on_its_own() -> None:  # C42
    assert held_rows(split_fused((8,), (4, 4), 1, 2)) == [2, 3, 6, 7]


def test_experts_are_split_over_two_axes() -> None:  # C7 C15
    """4 experts over ep = 2, their 6 rows over etp = 3: rank (1, 2) holds rows 4 and 5 of the experts 2 and 3."""
    shape = (4, 6, 5)
    over_ep, over_etp = split(shape, 0, 1, 2, axis="ep"), split(shape, 1, 2, 3, axis="etp")
    spec = split_over(over_ep, over_etp, replica_axes=("edp",))
    assert (spec.local_shape, spec.replica_axes, spec.split_axes) == ((2, 2, 5), ("edp",), ("ep", "etp"))
    assert [part.whole for part in spec.parts] == [Box((2, 4, 0), (4, 6, 5))]


def test_copies_over_an_axis_belong_to_its_first_rank() -> None:  # C14
    """Split over ep, replicated over etp."""
    specs = [
        split_over(split((4, 3), 0, e, 2, axis="ep"), replicated((4, 3), t, axis="etp", partial_grad=True))
        for e in range(2)
        for t in range(2)
    ]
    assert [spec.owned_flat_ranges() for spec in specs] == [[(0, 6)], [], [(0, 6)], []]
    assert {(spec.copied_axes, spec.partial_axes) for spec in specs} == {(("etp",), ("etp",))}


def test_rank_with_padding_alone() -> None:  # C21
    specs = [split((9, 2), 0, i, 4, padded=16) for i in range(4)]
    assert [spec.local_shape for spec in specs] == [(4, 2)] * 4
    assert [len(held_rows(spec)) for spec in specs] == [4, 4, 1, 0]
    assert specs[3].parts == () and specs[3].owned_flat_ranges() == []
    assert not allocate(specs[2], torch.float32, "cpu")[1:].any(), "padding that nothing fills"


@quick
@given(padded_splits())
def test_norms_leave_padding_out(specs: list[ShardSpec]) -> None:
    for spec in specs:
        counted = sum(last - first for first, last in spec.owned_flat_ranges())
        assert counted == sum(part.local.numel for part in spec.parts)


def test_scalar_is_owned_by_the_first_rank() -> None:
    assert replicated((), 0).owned_flat_ranges() == [(0, 1)]
    assert replicated((), 1).owned_flat_ranges() == []


def test_parameter_carries_its_spec() -> None:
    spec = split((8, 2), 0, 1, 2)
    parameter = allocate(spec, torch.float64, "cpu")
    assert spec_of(parameter) is spec
    assert (parameter.shape, parameter.dtype) == ((4, 2), torch.float64)
    amend_spec(parameter, tied=(0, 1))
    assert spec_of(parameter) == replace(spec, tied=(0, 1))
    assert spec_of(nn.Parameter(torch.zeros(2, 3))) == replicated((2, 3))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ShardSpec((4,), (Split(0, "ep", (((0, 2),), ((2, 4),))),), (("tp", 0),)), "give its index on 'ep'"),
        (lambda: ShardSpec((4,), (Split(0, "ep", (((0, 4),),)),), (("ep", 1),)), "from 0 to 0"),
        (lambda: split_over(split((4,), 0, 0, 2), split((4,), 0, 0, 2, axis="ep", padded=6)), "cannot be padded"),
        (lambda: split_over(split((4,), 0, 0, 2), replicated((2,))), "different global shapes"),
    ],
)
def test_contradictions_are_refused(make: object, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        make()
