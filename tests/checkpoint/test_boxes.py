"""Boxes cover flat ranges exactly, and the owned pieces of all ranks cover every tensor exactly once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from megatron_core.checkpoint import Box, parameter_pieces, pieces_of
from megatron_core.parallel.boxes import flat_boxes
from megatron_core.parallel.sharding import ShardSpec, replicated
from tests.parallel.specs import ANY_SPLIT, numbered

quick = settings(deadline=None, max_examples=80)
SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


def index(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))


def boxed(tensor: np.ndarray, box: Box) -> np.ndarray:
    return tensor[index(box)]


@quick
@given(SHAPES, st.data())
def test_boxes_cover_a_flat_range(shape: tuple[int, ...], data: st.DataObject) -> None:
    """In order, without gaps or overlaps, and at most 2 (dims - 1) + 1 boxes."""
    tensor = numbered(shape)
    start = data.draw(st.integers(0, tensor.size - 1))
    stop = data.draw(st.integers(start + 1, tensor.size))
    boxes = list(flat_boxes(shape, start, stop))
    assert all(boxed(tensor, box).ravel()[0] == number + 1 for box, number in boxes)
    found = np.concatenate([boxed(tensor, box).ravel() for box, _ in boxes])
    np.testing.assert_array_equal(found, np.arange(start + 1, stop + 1))
    assert len(boxes) <= 2 * max(len(shape) - 1, 0) + 1


def test_whole_tensor_is_one_box() -> None:
    assert list(flat_boxes((3, 4, 5), 0, 60)) == [(Box((0, 0, 0), (3, 4, 5)), 0)]
    assert list(flat_boxes((), 0, 1)) == [(Box((), ()), 0)]


@quick
@given(ANY_SPLIT, st.data())
def test_owned_pieces_of_all_ranks_are_the_tensor(specs: list[ShardSpec], data: st.DataObject) -> None:  # C42
    """Each tensor-parallel part is cut into flat shards at arbitrary positions, as for data-parallel ranks."""
    full = numbered(specs[0].global_shape)
    times_owned = np.zeros(full.shape, dtype=np.int64)
    for spec in specs:
        local = torch.full(spec.local_shape, -1)
        spec.localise(torch.from_numpy(full), local)
        flat, held = local.view(-1), 0
        cuts = sorted(data.draw(st.lists(st.integers(0, flat.numel()), max_size=3)))
        for start, stop in zip([0, *cuts], [*cuts, flat.numel()], strict=True):
            if start == stop:
                continue
            for piece in pieces_of("w", spec, spec.local_shape, start, stop, flat[start:stop]):
                assert (piece.name, piece.global_shape) == ("w", full.shape)
                assert tuple(piece.memory.shape) == piece.box.shape
                np.testing.assert_array_equal(piece.memory.numpy(), boxed(full, piece.box))
                times_owned[index(piece.box)] += piece.owned
                held += piece.box.numel
        assert held == int((flat != 0).sum()), "all but the padding has a place"
    assert (times_owned == 1).all()


@quick
@given(ANY_SPLIT)
def test_memory_of_a_piece_is_the_tensors_own(specs: list[ShardSpec]) -> None:
    """Filling the pieces fills the parameter except its padding."""
    for spec in specs:
        local, expected = torch.zeros(spec.local_shape), torch.zeros(spec.local_shape)
        for piece in pieces_of("w", spec, spec.local_shape, 0, local.numel(), local.view(-1)):
            piece.memory.fill_(1.0)
        spec.localise(torch.ones(spec.global_shape), expected)
        assert torch.equal(local, expected)


def test_copy_of_a_tied_tensor_is_never_saved() -> None:  # C43
    spec = replace(replicated((2, 3)), is_copy=True)
    assert not any(piece.owned for piece in pieces_of("w", spec, (2, 3), 0, 6, torch.zeros(6)))


def test_pieces_of_parameters() -> None:
    weight = nn.Parameter(torch.randn(2, 3))
    (piece,) = parameter_pieces([("a.weight", weight)])
    assert (piece.name, piece.box, piece.owned) == ("model.a.weight", Box((0, 0), (2, 3)), True)
    assert torch.equal(piece.memory, weight)


@pytest.mark.parametrize(
    ("a", "b", "common"),
    [
        (Box((0, 0), (2, 4)), Box((1, 2), (5, 6)), Box((1, 2), (2, 4))),
        (Box((0,), (2,)), Box((2,), (3,)), None),
        (Box((0, 0), (2, 4)), Box((1, 4), (2, 5)), None),
        (Box((), ()), Box((), ()), Box((), ())),
    ],
)
def test_intersection(a: Box, b: Box, common: Box | None) -> None:
    assert a.intersect(b) == b.intersect(a) == common
    if common is not None:
        tensor = numbered((6, 6)[: len(a.start)])
        np.testing.assert_array_equal(boxed(tensor, common), boxed(tensor, a)[common.within(a)])
