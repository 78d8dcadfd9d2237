"""Native kernels of FP8: largest numbers, casts to the memory orders of products, and the roll of histories.

A launch finds the largest numbers of blocks with a whole extent, in parts; another one combines the parts, computes the
scales and casts. Other blocks need one launch for everything.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from megatron_core.ops import native
from megatron_core.ops.multi_tensor import CHUNK, table_of
from megatron_core.ops.operator import are_plain, define

Order = Literal["rows", "columns"]
"""Memory order of a matrix: row-major or column-major."""
MEMORY_ORDERS: tuple[Order, Order] = ("rows", "columns")
TILE = 128
TILE_BLOCKS = 512
"""Rows and columns of a kernel's tile, and maximal number of blocks in a tile (csrc/common/fp8.h)."""
# Every tile of a cast reads all parts of its blocks: 512 numbers of a matrix, next to 16,384 elements.
MOST_PARTS = (32, 16)
"""Largest numbers of parts of a matrix down and across in which the largest number is found."""
GIVEN, OWN, PARTS, ONE, SHARED, ABSENT = range(6)
"""Origin of the scales of an order: ``ScaleSource`` of csrc/common/fp8.h; SHARED: those of the other order."""


class Source(NamedTuple):
    """The blocks of one order of a cast, and the numbers from which their scales are computed."""

    blocks: tuple[int | None, int | None]
    kind: int = OWN
    numbers: Tensor | None = None
    """Scales, or amaxes in parts."""


class NativeCast(NamedTuple):
    """A matrix in one order; ``scale`` and ``inverse`` (1 / scale) are None if the scales were an input."""

    data: Tensor
    scale: Tensor | None
    inverse: Tensor | None


def part_grid(x: Tensor, blocks: Sequence[tuple[int | None, int | None]]) -> tuple[int, int]:
    """Numbers of parts down and across in which the amaxes of such blocks of ``x`` are found."""
    down, across = (-(-extent // TILE) for extent in x.shape[-2:])
    # An extent without whole blocks can be divided as far as tiles go, because each amax belongs to one part.
    down = min(down, MOST_PARTS[0]) if any(rows is None for rows, _ in blocks) else down
    across = min(across, MOST_PARTS[1]) if any(columns is None for _, columns in blocks) else across
    return down, across


def amaxes_in_parts(
    x: Tensor, grid: tuple[int, int], blocks: Sequence[tuple[int | None, int | None]]
) -> Sequence[Tensor]:
    """The amaxes of one or two kinds of blocks of ``x``; a whole extent has a number for each part of ``grid``."""
    return _call(_fp8_amax, x.contiguous(), *grid, _extents(blocks))


def amaxes_of_list(matrices: Sequence[Tensor]) -> Sequence[Tensor]:
    """The amaxes of whole, contiguous matrices of one dtype in parts ``[parts, 1]``, in one launch for 64 matrices."""
    elements = max(matrix.numel() for matrix in matrices)
    chunk = max(CHUNK, -(-elements // math.prod(MOST_PARTS) // 64) * 64)
    counts = [-(-matrix.numel() // chunk) for matrix in matrices]
    amaxes = matrices[0].new_empty(sum(counts), 1, dtype=torch.promote_types(matrices[0].dtype, torch.float32))
    native.call("largest", matrices[0], len(matrices), table_of(matrices), chunk, amaxes, len(amaxes))
    return amaxes.split(counts)


def cast_orders(
    x: Tensor,
    dtype: torch.dtype,
    sources: Mapping[Order, Source],
    *,
    power_of_two: bool = False,
    grid: tuple[int, int] = (1, 1),
    recorded: Tensor | None = None,
) -> dict[Order, NativeCast]:
    """Cast ``x`` to the orders of ``sources`` in one launch.

    ``grid``: the parts of amaxes. ``recorded``: a float32 number that is raised to the largest absolute value of ``x``;
    elements that are not finite become NaN.
    """
    pair = [sources.get(order, Source((None, None), ABSENT)) for order in MEMORY_ORDERS]
    # Scales that do not depend on the order are computed once.
    if pair[0].kind != ABSENT and pair[0] == pair[1] and None in pair[0].blocks:
        pair[1] = pair[1]._replace(kind=SHARED)
    kinds = [source.kind for source in pair]
    numbers = [source.numbers for source in pair]
    extents = _extents([source.blocks for source in pair])
    tensors = list(_call(_fp8_cast, x.contiguous(), dtype, power_of_two, *grid, extents, kinds, *numbers, recorded))
    casts: dict[Order, NativeCast] = {}
    for order, kind in zip(MEMORY_ORDERS, kinds, strict=True):
        if kind == ABSENT:
            continue
        data = tensors.pop(0)
        computed = [tensors.pop(0), tensors.pop(0)] if kind in (OWN, PARTS) else [None, None]
        if kind == SHARED:
            computed = [casts["rows"].scale, casts["rows"].inverse]
        casts[order] = NativeCast(data if order == "rows" else data.mT, *computed)
    return casts


def roll_natively(
    latest: Tensor, history: Tensor, scales: Tensor, largest: Sequence[float], *, takes_largest: bool, divisor: float
) -> None:
    """``amax_history.roll`` in one launch."""
    numbers = (latest.numel(), history.shape[1], int(takes_largest), divisor, *largest)
    native.call("fp8_roll", latest, *numbers, latest, history, scales[0], scales[1])


def scale_grid(x: Tensor, blocks: tuple[int | None, int | None]) -> tuple[int, ...]:
    """Shape of the scales."""
    rows, columns = x.shape[-2:]
    return *x.shape[:-2], -(-rows // (blocks[0] or rows)), -(-columns // (blocks[1] or columns))


def _extents(blocks: Sequence[tuple[int | None, int | None]]) -> list[int]:
    """Extents of blocks as arguments of the library, where 0 is a whole extent."""
    return [extent or 0 for pair in blocks for extent in pair]


def _blocks(extents: Sequence[int]) -> list[tuple[int | None, int | None]]:
    return [(rows or None, columns or None) for rows, columns in zip(extents[::2], extents[1::2], strict=True)]


def _sizes(x: Tensor) -> tuple[int, int, int]:
    """Number of matrices, rows and columns."""
    rows, columns = x.shape[-2:]
    return x.numel() // (rows * columns), rows, columns


def _new_amaxes(x: Tensor, row_parts: int, column_parts: int, extents: Sequence[int]) -> list[Tensor]:
    wide = torch.promote_types(x.dtype, torch.float32)
    shapes = []
    for rows, columns in _blocks(extents):
        *matrices, down, across = scale_grid(x, (rows, columns))
        shapes.append((*matrices, row_parts if rows is None else down, column_parts if columns is None else across))
    return [torch.empty(shape, dtype=wide, device=x.device) for shape in shapes]


def _new_casts(x: Tensor, dtype: torch.dtype, extents: Sequence[int], kinds: Sequence[int]) -> list[Tensor]:
    """The outputs of a cast: for each order the matrix, and its scales and their inverses if they are computed."""
    outputs = []
    for number, (blocks, kind) in enumerate(zip(_blocks(extents), kinds, strict=True)):
        if kind == ABSENT:
            continue
        shape = (*x.shape[:-2], x.shape[-1], x.shape[-2]) if number else x.shape
        outputs.append(torch.empty(shape, dtype=dtype, device=x.device))
        if kind in (OWN, PARTS):
            *matrices, down, across = scale_grid(x, blocks)
            outputs.append(torch.empty((*matrices, down, across), dtype=torch.float32, device=x.device))
            turned = _is_turned(number, blocks)
            inverse = torch.empty(
                (*matrices, across, down) if turned else (*matrices, down, across), dtype=torch.float32, device=x.device
            )
            outputs.append(inverse.mT if turned else inverse)
    return outputs


def _is_turned(order: int, blocks: tuple[int | None, int | None]) -> bool:
    """Whether inverses are column-major, as torch's product of blocks reads them (``scaled_product.block_operands``).

    The product reads the matrix, or its transpose for column-major data: scales of rows column-major, of squares
    row-major.
    """
    if None in blocks:
        return False
    of_rows = blocks[order] == 1
    return of_rows != bool(order)


def _fp8_amax(x: Tensor, row_parts: int, column_parts: int, extents: Sequence[int]) -> list[Tensor]:
    amaxes = _new_amaxes(x, row_parts, column_parts, extents)
    second: tuple[native.Value, ...] = (*extents[2:], amaxes[1]) if len(amaxes) > 1 else (0, 0, None)
    native.call("fp8_amax", x, *_sizes(x), x, row_parts, column_parts, *extents[:2], amaxes[0], *second)
    return amaxes


def _fp8_cast(
    x: Tensor,
    dtype: torch.dtype,
    power_of_two: bool,
    row_parts: int,
    column_parts: int,
    extents: Sequence[int],
    kinds: Sequence[int],
    numbers: Tensor | None,
    other_numbers: Tensor | None,
    recorded: Tensor | None,
) -> list[Tensor]:
    outputs = _new_casts(x, dtype, extents, kinds)
    remaining = list(outputs)
    arguments: list[native.Value] = []
    for order, (kind, input_numbers) in enumerate(zip(kinds, (numbers, other_numbers), strict=True)):
        data = None if kind == ABSENT else remaining.pop(0)
        scale, inverse = (remaining.pop(0), remaining.pop(0)) if kind in (OWN, PARTS) else (input_numbers, None)
        strides = inverse.stride()[-2:] if inverse is not None else (0, 0)
        amax = input_numbers if kind == PARTS else None
        source = kind if kind in (OWN, PARTS, ONE) else GIVEN
        arguments += [*extents[2 * order : 2 * order + 2], source, amax, scale, inverse, *strides, data]
    is_shared = int(kinds[1] == SHARED)
    shared = (int(dtype == torch.float8_e5m2), int(power_of_two), row_parts, column_parts, is_shared, recorded)
    native.call("fp8_cast", x, *_sizes(x), x, *shared, *arguments)
    return outputs


def _call(operation: Callable[..., Any], *arguments: Any) -> Any:
    """Run an operation; as an operator of torch under modes and the profiler, which would not see it otherwise."""
    # The dispatcher would take longer than the launch of a small kernel.
    return operation(*arguments) if are_plain(arguments) else _OPERATORS[operation](*arguments)


_OPERATORS = {
    _fp8_amax: define("fp8_amax", fake=_new_amaxes)(_fp8_amax),
    _fp8_cast: define(
        "fp8_cast",
        ("recorded",),
        fake=lambda x, dtype, _power, _down, _across, extents, kinds, *_: _new_casts(x, dtype, extents, kinds),
    )(_fp8_cast),
}
