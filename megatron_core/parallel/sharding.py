"""``ShardSpec``: the single description of how a parameter is split over ranks.

Initialization, gradient completion and reduction, norms, optimizer sharding, replica checks and checkpoints read only
the ``ShardSpec`` of a parameter; none of them depends on particular axes.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import prod

import torch
from torch import Tensor, nn

from megatron_core.errors import LayoutError
from megatron_core.parallel.boxes import Box

Range = tuple[int, int]
DATA_AXES = ("dp", "cp")
"""The data axes of dense layers; those of experts are ``("edp",)``."""


@dataclass(frozen=True)
# Ranges and not a number of equal parts: fused matrices, padding and shared key-value heads are all lists of ranges.
class Split:
    """How dimension ``dim`` is split over the ranks of ``axis``.

    ``ranges[i]`` are the half-open global ranges held by index i of the axis, concatenated in its local tensor. If
    several indices hold the same range, they share it: the lowest index owns it, and each computes a partial gradient
    of it.
    """

    dim: int
    axis: str
    ranges: tuple[tuple[Range, ...], ...]
    local_extent: int = 0
    """Rows per index including padding, which stays zero and is never saved; 0: no padding."""

    @cached_property
    def shared(self) -> tuple[Range, ...]:
        """Ranges held by several indices, in ascending order; the same on every rank."""
        pieces = [piece for ranges in self.ranges for piece in ranges]
        return tuple(sorted({piece for piece in pieces if pieces.count(piece) > 1}))


@dataclass(frozen=True)
class _Run:
    """Rows of one dim that a rank holds: their local and global position, and whether this rank owns them."""

    local: Range
    whole: Range
    owned: bool
    shared_over: tuple[str, ...]


@dataclass(frozen=True)
class LocalPart:
    """A box of this rank's tensor and the corresponding box of the global tensor."""

    local: Box
    whole: Box
    owned: bool
    """Whether this rank, among its model-parallel ranks, counts and saves the part."""
    shared_over: tuple[str, ...]
    """Axes over which other ranks hold the same part of a split dimension."""


@dataclass(frozen=True)
class Fused:
    """Matrices stored in one parameter, interleaved along its rows (the dim before the last).

    ``rows``: number of rows of each matrix in a block, and blocks repeat: queries, keys and values of each group, or
    one block of gate and up projection.
    """

    rows: tuple[int, ...]
    head_size: int = 0
    """Rows of each attention head; 0: the matrices have no heads."""


@dataclass(frozen=True)
class ShardSpec:
    """The part of a global tensor that this rank holds, and how the other ranks hold the rest.

    ``indices`` are this rank's positions on the model axes of its view (dense: tp; experts: etp, ep). Over an axis
    without a split every rank holds the same elements, owned by index 0. Several splits of one dimension are
    intersected.
    """

    global_shape: tuple[int, ...]
    splits: tuple[Split, ...] = ()
    indices: tuple[tuple[str, int], ...] = ()
    partial_axes: tuple[str, ...] = ()
    """Model axes over which each rank's gradient is partial and must be summed (norms with sequence parallelism, query
    and key norms)."""
    replica_axes: tuple[str, ...] = DATA_AXES
    """Data axes over which the parameter is replicated and gradients are summed."""
    tied: tuple[int, ...] = ()
    """Pipeline ranks that hold this tensor, if there are several: its gradient is summed over them."""
    is_copy: bool = False
    """Whether this is not the first copy of a tied tensor: trained like the first, but never counted or saved."""
    fused: Fused | None = None
    """The matrices of which the tensor consists; None: one matrix, or a stack of matrices."""

    def __post_init__(self) -> None:
        known = dict(self.indices)
        for split in self.splits:
            if split.axis not in known or not 0 <= known[split.axis] < len(split.ranges):
                raise LayoutError(
                    f"dim {split.dim} is split over {len(split.ranges)} ranks of the axis {split.axis!r}, and this "
                    f"rank has the indices {known}; give its index on {split.axis!r}, from 0 to {len(split.ranges) - 1}"
                )
            # Padding is at the end of a dim; the intersection of two splits has no end of its own.
            if split.local_extent and sum(other.dim == split.dim for other in self.splits) > 1:
                raise LayoutError(f"dim {split.dim} is split twice, so it cannot be padded; split it once")

    @property
    def split_axes(self) -> tuple[str, ...]:
        """The axes over which ranks hold different parts."""
        return tuple(split.axis for split in self.splits)

    @property
    def copied_axes(self) -> tuple[str, ...]:
        """The model axes over which every rank holds the same elements."""
        return tuple(axis for axis, _ in self.indices if axis not in self.split_axes)

    @cached_property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of this rank's tensor, padding included."""
        shape = []
        for dim, runs in enumerate(self.runs):
            # Checked above: only one split of a dim has padding.
            padded = max((split.local_extent for split in self.splits if split.dim == dim), default=0)
            shape.append(padded or sum(stop - start for start, stop in (run.local for run in runs)))
        return tuple(shape)

    @cached_property
    def parts(self) -> tuple[LocalPart, ...]:
        """The boxes that this rank holds: its whole tensor without the padding."""
        # One owner for each element, so that norms count it once and a checkpoint stores it once.
        owns_copies = not self.is_copy and all(
            index == 0 for axis, index in self.indices if axis not in self.split_axes
        )
        boxes = []
        for runs in product(*self.runs):
            local = Box(tuple(run.local[0] for run in runs), tuple(run.local[1] for run in runs))
            global_box = Box(tuple(run.whole[0] for run in runs), tuple(run.whole[1] for run in runs))
            shared = tuple(axis for run in runs for axis in run.shared_over)
            boxes.append(LocalPart(local, global_box, owns_copies and all(run.owned for run in runs), shared))
        return tuple(boxes)

    def owned_flat_ranges(self) -> list[Range]:
        """Ranges of flat local indices that this rank owns, ascending, with adjacent ranges merged.

        Every element of the global tensor is owned by exactly one model-parallel rank.
        """
        ranges: list[Range] = []
        # Merged, because buckets and norms loop over ranges: a split along dim 0 is one range instead of one per row.
        for start, stop in sorted(
            r for piece in self.parts if piece.owned for r in piece.local.flat_ranges(self.local_shape)
        ):
            if ranges and ranges[-1][1] == start:
                ranges[-1] = (ranges[-1][0], stop)
            else:
                ranges.append((start, stop))
        return ranges

    def all_shared_ranges(self, split: Split) -> list[Range]:
        """Global ranges along ``split.dim`` that ranks of ``split.axis`` share; the same on all of them."""
        common = list(split.shared)
        for other in self.splits:
            if other.dim == split.dim and other is not split:
                common = [
                    intersection
                    for span in common
                    for piece in self._held(other)
                    if (intersection := _common(span, piece))
                ]
        return sorted(common)

    def shared_ranges(self, split: Split) -> list[tuple[Range, Range]]:
        """Pairs (local range, global range) along ``split.dim`` that this rank shares over ``split.axis``."""
        runs = self.runs[split.dim]
        return [(run.local, run.whole) for run in runs if split.axis in run.shared_over]

    def localise(self, full: Tensor, local: Tensor) -> None:
        """Copy this rank's part of the global tensor ``full`` into ``local``; padding becomes zero."""
        # The padding.
        local.zero_()
        for piece in self.parts:
            local[piece.local.index] = full[piece.whole.index].to(local)

    @cached_property
    def runs(self) -> tuple[tuple[_Run, ...], ...]:
        """The runs that this rank holds of each dim, in local order."""
        return tuple(tuple(self._runs_of(dim, extent)) for dim, extent in enumerate(self.global_shape))

    def _held(self, split: Split) -> tuple[Range, ...]:
        return split.ranges[dict(self.indices)[split.axis]]

    def _runs_of(self, dim: int, extent: int) -> Iterator[_Run]:
        runs: list[tuple[Range, bool, tuple[str, ...]]] = [((0, extent), True, ())]
        for split in (split for split in self.splits if split.dim == dim):
            # A range that a lower index holds, too, belongs to that index.
            lower = split.ranges[: dict(self.indices)[split.axis]]
            runs = [
                (
                    intersection,
                    owned and not any(piece in ranges for ranges in lower),
                    shared + ((split.axis,) if piece in split.shared else ()),
                )
                for piece in self._held(split)
                for before, owned, shared in runs
                if (intersection := _common(before, piece))
            ]
        offset = 0
        for (start, stop), owned, shared in runs:
            yield _Run((offset, offset + stop - start), (start, stop), owned, shared)
            offset += stop - start


def _common(a: Range, b: Range) -> Range | None:
    start = max(a[0], b[0])
    stop = min(a[1], b[1])
    return (start, stop) if start < stop else None


def replicated(shape: tuple[int, ...], index: int = 0, *, axis: str = "tp", partial_grad: bool = False) -> ShardSpec:
    """Every rank of ``axis`` holds the whole tensor; with ``partial_grad`` each computes a part of its gradient."""
    return ShardSpec(tuple(shape), (), ((axis, index),), (axis,) if partial_grad else ())


def split(
    shape: tuple[int, ...], dim: int, index: int, size: int, *, axis: str = "tp", padded: int | None = None
) -> ShardSpec:
    """Equal contiguous parts along ``dim``; with ``padded``, equal parts of that larger size."""
    extent = shape[dim]
    # Bounds are cut at ``extent``: with padding the last ranks may hold fewer rows, or none.
    length = (padded or extent) // size
    bounds = [(min(i * length, extent), min((i + 1) * length, extent)) for i in range(size)]
    ranges = tuple(((start, stop),) if start < stop else () for start, stop in bounds)
    return ShardSpec(tuple(shape), (Split(dim, axis, ranges, length if padded else 0),), ((axis, index),))


def split_fused(
    shape: tuple[int, ...], pieces: tuple[int, ...], index: int, size: int, *, dim: int = 0, axis: str = "tp"
) -> ShardSpec:
    """Dimension ``dim`` concatenates several matrices (gate and up); every rank holds its part of each."""
    starts = [sum(pieces[:i]) for i in range(len(pieces))]
    ranges = tuple(
        tuple((start + i * (n // size), start + (i + 1) * (n // size)) for start, n in zip(starts, pieces, strict=True))
        for i in range(size)
    )
    # Optimizers of matrices treat each of the matrices separately; vectors, such as biases, have no rows.
    fused = Fused(pieces) if len(pieces) > 1 and dim == len(shape) - 2 else None
    return ShardSpec(tuple(shape), (Split(dim, axis, ranges),), ((axis, index),), fused=fused)


def split_qkv(shape: tuple[int, ...], heads: int, groups: int, head_size: int, index: int, size: int) -> ShardSpec:
    """Fused query, key and value weight: along dim 0, each key-value group has its query heads, optionally as many
    gates, its key head and its value head, ``head_size`` rows each.

    With fewer groups than ranks, a group's query heads are split over several ranks, which all hold its key and value;
    gates are not supported in this case.
    """
    queries = heads // groups * head_size
    gates = shape[0] // groups - queries - 2 * head_size
    fused = Fused((queries, *([gates] if gates else []), head_size, head_size), head_size)
    if groups >= size:
        return replace(split(shape, 0, index, size), fused=fused)
    # Each rank needs the whole key and value head of its query heads, so the ranks of a group hold copies, and
    # ``Split`` sums the gradients of shared ranges.
    sharers = size // groups
    group_rows = queries + 2 * head_size
    own_query = heads // size * head_size
    ranges = []
    for i in range(size):
        base = i // sharers * group_rows
        query = base + i % sharers * own_query
        key = base + group_rows - 2 * head_size
        ranges.append(((query, query + own_query), (key, key + 2 * head_size)))
    return ShardSpec(tuple(shape), (Split(0, "tp", tuple(ranges)),), (("tp", index),), fused=fused)


def split_over(*specs: ShardSpec, replica_axes: tuple[str, ...] = DATA_AXES) -> ShardSpec:
    """Combine the splits of ``specs`` over several axes of one tensor (experts: ep and etp)."""
    shapes = {spec.global_shape for spec in specs}
    if len(shapes) != 1:
        raise LayoutError(f"the specs have different global shapes: {sorted(shapes)}; give all of them one shape")
    return ShardSpec(
        specs[0].global_shape,
        tuple(split for spec in specs for split in spec.splits),
        # A dict, because several specs may give the index of the same axis.
        tuple(dict(index for spec in specs for index in spec.indices).items()),
        tuple(dict.fromkeys(axis for spec in specs for axis in spec.partial_axes)),
        replica_axes,
        fused=next((spec.fused for spec in specs if spec.fused is not None), None),
    )


def spec_of(parameter: nn.Parameter) -> ShardSpec:
    """The ``ShardSpec`` of a parameter; a parameter without one is replicated."""
    spec = getattr(parameter, "shard_spec", None)
    # Parameters of a user's own layers, which know nothing of shards.
    return spec if spec is not None else replicated(tuple(parameter.shape))


def allocate(spec: ShardSpec, dtype: torch.dtype, device: torch.device | str) -> nn.Parameter:
    """An uninitialized parameter with its ``ShardSpec``; padding is set to zero, because nothing fills it later."""
    elements = sum(piece.local.numel for piece in spec.parts)
    # No fill of memory that initialization or a checkpoint overwrites.
    make = torch.empty if elements == prod(spec.local_shape) else torch.zeros
    parameter = nn.Parameter(make(spec.local_shape, dtype=dtype, device=device))
    parameter.shard_spec = spec
    return parameter


def amend_spec(parameter: nn.Parameter, **changes) -> None:
    """Replace fields of a parameter's ``ShardSpec``."""
    parameter.shard_spec = replace(spec_of(parameter), **changes)
