"""The parts of a whole tensor that a rank may hold, given its index on each parallel axis."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, permutations, product
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

Axis = tuple[int, int]
"""This rank's index on an axis, and the number of ranks."""
Array = TypeVar("Array", np.ndarray, Tensor)
STRIDES = (1, 2, 3)
"""Numbers of matrices that may be joined in a split dimension: gate and up, or queries, keys and values."""


class Block(NamedTuple):
    """A split of a parameter that is known."""

    dim: int
    stride: int
    """Number of joined matrices, each of which is split."""


def possible_parts(
    array: np.ndarray, shape: Sequence[int], axes: Mapping[str, Axis], block: Block | None = None
) -> Iterator[np.ndarray]:
    """Yield the parts of ``array`` with ``shape`` that a rank may hold; none if there are none.

    Each dimension that is shorter is split over some of the axes, in blocks of equal size; over one axis also with
    joined matrices, or in the order of causal context parallelism (blocks i and 2 n - 1 - i of 2 n on rank i of n).
    """
    if array.ndim != len(shape) or any(a < b or a % max(b, 1) for a, b in zip(array.shape, shape, strict=True)):
        return
    split = [dim for dim, (a, b) in enumerate(zip(array.shape, shape, strict=True)) if a != b]
    choices = [list(_indices(array.shape[dim], shape[dim], axes, block, dim)) for dim in split]
    for indices in product(*choices):
        piece = array
        for dim, index in zip(split, indices, strict=True):
            piece = piece.take(index, axis=dim)
        yield piece


def _indices(total: int, local: int, axes: Mapping[str, Axis], block: Block | None, dim: int) -> Iterator[np.ndarray]:
    """Yield the index arrays of a dimension of ``total`` elements, of which this rank has ``local``."""
    names = list(axes)
    for chosen in chain(permutations(names, 1), permutations(names, 2)):
        ranks = 1
        index = 0
        for name in chosen:
            index = index * axes[name][1] + axes[name][0]
            ranks = ranks * axes[name][1]
        if ranks * local != total:
            continue
        strides = (block.stride,) if block is not None and block.dim == dim else STRIDES
        for stride in strides:
            if local % stride == 0:
                yield np.arange(total).reshape(stride, ranks, -1)[:, index].reshape(-1)
        if local % 2 == 0:
            halves = np.arange(total).reshape(2 * ranks, -1)
            yield halves[[index, 2 * ranks - 1 - index]].reshape(-1)


def sliced(parameter: Tensor, shape: Sequence[int], axes: Mapping[str, Axis], block: Block | None) -> Tensor:
    """This rank's part of a parameter, split over ``tp`` as ``block`` says; rows that pad it at the end are 0."""
    for dim, (a, b) in enumerate(zip(parameter.shape, shape, strict=True)):
        if a == b:
            continue
        index, ranks = axes.get("tp", (0, 1))
        stride = block.stride if block is not None and block.dim == dim else 1
        if b * ranks > a and stride == 1:  # a padded vocabulary
            padding = parameter.new_zeros(*parameter.shape[:dim], b * ranks - a, *parameter.shape[dim + 1 :])
            parameter = torch.cat([parameter, padding], dim)
        pieces = parameter.unflatten(dim, (stride, ranks, b // stride)).select(dim + 1, index)
        parameter = pieces.flatten(dim, dim + 1)
    return parameter


def gathered_tensor(x: Tensor) -> Tensor:
    """``x``, gathered from the ranks if it is a DTensor; then a collective call."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def in_float64(x: Tensor) -> np.ndarray:
    """A copy of the whole tensor: the program may change its memory later, such as by an activation in place."""
    return gathered_tensor(x.detach()).to("cpu", torch.float64, copy=True).numpy()
