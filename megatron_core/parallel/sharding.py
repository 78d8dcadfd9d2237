"""How a parameter is split over ranks: one record, which everything else reads.

Initialisation, gradient completion and reduction, norm, optimizer sharding, replica checks and checkpoints read a
parameter's ``ShardSpec`` and nothing else; none of them knows which axes there are.
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
class Split:
    """How dimension ``dim`` is cut over the ranks of ``axis``.

    ``ranges[i]`` are the half-open global ranges that index i of the axis holds, one after another in its local tensor.
    A range that several indices hold is shared by them: the lowest of them owns it, and each one's gradient of it is
    partial.
    """

    dim: int
    axis: str
    ranges: tuple[tuple[Range, ...], ...]
    local_extent: int = 0
    """Rows that each index has; those beyond its ranges are padding, which stays zero and is never saved. 0: as many
    as it holds."""

    @cached_property
    def shared(self) -> tuple[Range, ...]:
        """The ranges that several indices hold, in ascending order; the same on every rank."""
        held = [piece for ranges in self.ranges for piece in ranges]
        return tuple(sorted({piece for piece in held if held.count(piece) > 1}))


@dataclass(frozen=True)
class _Run:
    """Rows of one dim that a rank holds: where locally, where globally, and whether this rank owns them."""

    local: Range
    whole: Range
    owned: bool
    shared_over: tuple[str, ...]


@dataclass(frozen=True)
class LocalPart:
    """A box of this rank's tensor and the box of the global tensor that it is."""

    local: Box
    whole: Box
    owned: bool
    """Whether this rank is the one of its model-parallel ranks that counts and saves the part."""
    shared_over: tuple[str, ...]
    """Axes over which other ranks hold the same part of a split dimension."""


@dataclass(frozen=True)
class ShardSpec:
    """Which part of a global tensor this rank holds, and what the other ranks hold of it.

    ``indices`` are this rank's positions on the model axes of its view of the ranks (dense: tp; experts: etp, ep). Over
    an axis that no split names every rank holds the same, and index 0 owns it. Several splits of one dimension hold
    what all of them hold.
    """

    global_shape: tuple[int, ...]
    splits: tuple[Split, ...] = ()
    indices: tuple[tuple[str, int], ...] = ()
    partial_axes: tuple[str, ...] = ()
    """Model axes over which each rank's gradient is a part of the whole, so that it is summed over them (norms with
    sequence parallelism, query and key norms)."""
    replica_axes: tuple[str, ...] = DATA_AXES
    """Data axes over which copies exist and gradients are summed."""
    tied: bool = False
    """The first and the last pipeline stage both hold this tensor: its gradient is summed over both."""
    is_copy: bool = False
    """The last stage's copy of a tied tensor: trained like the first one, but never counted or saved."""
    sections: tuple[int, ...] = ()
    """Rows of the matrices that dim 0 holds in turn, over and over (queries, keys and values of a group); empty: it is
    one matrix."""

    def __post_init__(self) -> None:
        known = dict(self.indices)
        for split in self.splits:
            if split.axis not in known or not 0 <= known[split.axis] < len(split.ranges):
                raise LayoutError(
                    f"dim {split.dim} is split over {len(split.ranges)} ranks of the axis {split.axis!r}, and this "
                    f"rank has the indices {known}; give its index on {split.axis!r}, from 0 to {len(split.ranges) - 1}"
                )
            if split.local_extent and sum(other.dim == split.dim for other in self.splits) > 1:
                raise LayoutError(f"dim {split.dim} is split twice, so that it cannot be padded; split it once")

    @property
    def split_axes(self) -> tuple[str, ...]:
        """The axes over which ranks hold different parts."""
        return tuple(split.axis for split in self.splits)

    @property
    def copied_axes(self) -> tuple[str, ...]:
        """The model axes over which every rank holds the same."""
        return tuple(axis for axis, _ in self.indices if axis not in self.split_axes)

    @cached_property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of this rank's tensor, padding included."""
        shape = []
        for dim, runs in enumerate(self._runs):
            padded = max((split.local_extent for split in self.splits if split.dim == dim), default=0)
            shape.append(padded or sum(stop - start for start, stop in (run.local for run in runs)))
        return tuple(shape)

    @cached_property
    def parts(self) -> tuple[LocalPart, ...]:
        """The boxes that this rank holds; together they are its tensor without the padding."""
        owns_copies = not self.is_copy and all(
            index == 0 for axis, index in self.indices if axis not in self.split_axes
        )
        found = []
        for runs in product(*self._runs):
            local = Box(tuple(run.local[0] for run in runs), tuple(run.local[1] for run in runs))
            whole = Box(tuple(run.whole[0] for run in runs), tuple(run.whole[1] for run in runs))
            shared = tuple(axis for run in runs for axis in run.shared_over)
            found.append(LocalPart(local, whole, owns_copies and all(run.owned for run in runs), shared))
        return tuple(found)

    def owned_flat_ranges(self) -> list[Range]:
        """Ranges of elements of this rank's flattened tensor that it owns, in ascending order, neighbours joined.

        Over all model-parallel ranks every element of the global tensor is in exactly one of them.
        """
        ranges: list[Range] = []
        for first, last in sorted(
            r for part in self.parts if part.owned for r in part.local.flat_ranges(self.local_shape)
        ):
            if ranges and ranges[-1][1] == first:
                ranges[-1] = (ranges[-1][0], last)
            else:
                ranges.append((first, last))
        return ranges

    def all_shared_ranges(self, split: Split) -> list[Range]:
        """The global ranges along ``split.dim`` that ranks of ``split.axis`` share, the same list on all of them."""
        found = list(split.shared)
        for other in self.splits:
            if other.dim == split.dim and other is not split:
                found = [both for own in found for piece in self._held(other) if (both := _common(own, piece))]
        return sorted(found)

    def shared_ranges(self, split: Split) -> list[tuple[Range, Range]]:
        """Pairs (local range, global range) along ``split.dim`` of what this rank shares over ``split.axis``."""
        runs = self._runs[split.dim]
        return [(run.local, run.whole) for run in runs if split.axis in run.shared_over]

    def localise(self, full: Tensor, local: Tensor) -> None:
        """Copy this rank's part of ``full`` (the global tensor) into ``local``; padding becomes zero."""
        local.zero_()
        for part in self.parts:
            local[part.local.index] = full[part.whole.index].to(local)

    def element_numbers(self, start: int, stop: int, device: torch.device) -> Tensor:
        """The flat numbers in the global tensor of elements ``start ... stop - 1`` of this rank's flattened one, int64;
        those of padding have no meaning."""
        left = torch.arange(start, stop, device=device)
        numbers, stride = torch.zeros_like(left), 1
        for dim in reversed(range(len(self.global_shape))):
            own = torch.zeros(self.local_shape[dim], dtype=torch.int64)
            for run in self._runs[dim]:
                own[slice(*run.local)] = torch.arange(*run.whole)
            numbers += own.to(device)[left % len(own)] * stride
            left, stride = left // len(own), stride * self.global_shape[dim]
        return numbers

    @cached_property
    def _runs(self) -> tuple[tuple[_Run, ...], ...]:
        """For each dim what this rank holds of it, in local order."""
        return tuple(tuple(self._runs_of(dim, extent)) for dim, extent in enumerate(self.global_shape))

    def _held(self, split: Split) -> tuple[Range, ...]:
        return split.ranges[dict(self.indices)[split.axis]]

    def _runs_of(self, dim: int, extent: int) -> Iterator[_Run]:
        held: list[tuple[Range, bool, tuple[str, ...]]] = [((0, extent), True, ())]
        for split in (split for split in self.splits if split.dim == dim):
            lower = split.ranges[: dict(self.indices)[split.axis]]
            held = [
                (both, owned and not any(piece in ranges for ranges in lower), shared + _sharing_axes(split, piece))
                for piece in self._held(split)
                for before, owned, shared in held
                if (both := _common(before, piece))
            ]
        at = 0
        for (start, stop), owned, shared in held:
            yield _Run((at, at + stop - start), (start, stop), owned, shared)
            at += stop - start


def _sharing_axes(split: Split, piece: Range) -> tuple[str, ...]:
    return (split.axis,) if piece in split.shared else ()


def _common(a: Range, b: Range) -> Range | None:
    start, stop = max(a[0], b[0]), min(a[1], b[1])
    return (start, stop) if start < stop else None


def replicated(shape: tuple[int, ...], index: int = 0, *, axis: str = "tp", partial_grad: bool = False) -> ShardSpec:
    """Every rank of ``axis`` holds the whole tensor; with ``partial_grad`` each has a part of its gradient."""
    return ShardSpec(tuple(shape), (), ((axis, index),), (axis,) if partial_grad else ())


def split(
    shape: tuple[int, ...], dim: int, index: int, size: int, *, axis: str = "tp", padded: int | None = None
) -> ShardSpec:
    """Equal contiguous parts along ``dim``; with ``padded`` the parts are those of that larger extent."""
    extent = shape[dim]
    part = (padded or extent) // size
    bounds = [(min(i * part, extent), min((i + 1) * part, extent)) for i in range(size)]
    ranges = tuple(((start, stop),) if start < stop else () for start, stop in bounds)
    return ShardSpec(tuple(shape), (Split(dim, axis, ranges, part if padded else 0),), ((axis, index),))


def split_fused(
    shape: tuple[int, ...], pieces: tuple[int, ...], index: int, size: int, *, dim: int = 0, axis: str = "tp"
) -> ShardSpec:
    """Dimension ``dim`` is several matrices one after another (gate and up); every rank holds its part of each."""
    starts = [sum(pieces[:i]) for i in range(len(pieces))]
    ranges = tuple(
        tuple((start + i * (n // size), start + (i + 1) * (n // size)) for start, n in zip(starts, pieces, strict=True))
        for i in range(size)
    )
    return ShardSpec(tuple(shape), (Split(dim, axis, ranges),), ((axis, index),))


def split_qkv(shape: tuple[int, ...], heads: int, groups: int, head_size: int, index: int, size: int) -> ShardSpec:
    """Dim 0 is, for each key-value group, its query heads, perhaps as many gates, its key head and its value head,
    ``head_size`` rows each.

    With fewer groups than ranks, a group's query heads are split over ranks that all hold its key and value; there are
    no gates then.
    """
    queries = heads // groups * head_size
    gates = shape[0] // groups - queries - 2 * head_size
    sections = (queries, *([gates] if gates else []), head_size, head_size)
    if groups >= size:
        return replace(split(shape, 0, index, size), sections=sections)
    sharers = size // groups
    group_rows, own_query = queries + 2 * head_size, heads // size * head_size
    ranges = []
    for i in range(size):
        base = i // sharers * group_rows
        query = base + i % sharers * own_query
        key = base + group_rows - 2 * head_size
        ranges.append(((query, query + own_query), (key, key + 2 * head_size)))
    return ShardSpec(tuple(shape), (Split(0, "tp", tuple(ranges)),), (("tp", index),), sections=sections)


def split_over(*specs: ShardSpec, replica_axes: tuple[str, ...] = DATA_AXES) -> ShardSpec:
    """One tensor that is split as each of ``specs`` says, over several axes at once (experts: ep and etp)."""
    shapes = {spec.global_shape for spec in specs}
    if len(shapes) != 1:
        raise LayoutError(f"the splits are of tensors of different shapes: {sorted(shapes)}; give one shape to all")
    return ShardSpec(
        specs[0].global_shape,
        tuple(split for spec in specs for split in spec.splits),
        tuple(dict(index for spec in specs for index in spec.indices).items()),
        tuple(dict.fromkeys(axis for spec in specs for axis in spec.partial_axes)),
        replica_axes,
    )


def spec_of(parameter: nn.Parameter) -> ShardSpec:
    """The parameter's ``ShardSpec``; a parameter without one is whole on every rank."""
    spec = getattr(parameter, "shard_spec", None)
    return spec if spec is not None else replicated(tuple(parameter.shape))


def allocate(spec: ShardSpec, dtype: torch.dtype, device: torch.device | str) -> nn.Parameter:
    """An uninitialised parameter that carries its ``ShardSpec``; its padding, which nothing fills later, is zero."""
    held = sum(part.local.numel for part in spec.parts)
    make = torch.empty if held == prod(spec.local_shape) else torch.zeros
    parameter = nn.Parameter(make(spec.local_shape, dtype=dtype, device=device))
    parameter.shard_spec = spec
    return parameter


def amend_spec(parameter: nn.Parameter, **changes) -> None:
    """Replace fields of the parameter's ``ShardSpec``."""
    parameter.shard_spec = replace(spec_of(parameter), **changes)
