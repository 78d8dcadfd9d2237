"""How a parameter is split, said once.

Initialisation, gradient reduction, norm, optimizer sharding and checkpoints read a parameter's ``ShardSpec``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

Range = tuple[int, int]


@dataclass(frozen=True)
class ShardSpec:
    """Which part of a global tensor each rank of the tensor-parallel axis holds.

    ``ranges[i]`` are the half-open global ranges along ``dim`` that rank i holds, one after another in its local
    tensor. Local rows beyond them are padding: they stay zero and are never saved. A range that several ranks hold is
    a replica: the lowest of them owns it, and each rank's gradient of it is a part of the whole.
    """

    global_shape: tuple[int, ...]
    dim: int | None = None
    """Split dimension; None: every rank holds the whole tensor."""
    ranges: tuple[tuple[Range, ...], ...] = ()
    index: int = 0
    """This rank's place on the tensor-parallel axis."""
    padding: int = 0
    """Rows along ``dim`` that this rank holds beyond its ranges."""
    partial_grad: bool = False
    """Each rank's gradient is a part of the whole (sequence parallel norms, query and key norms): sum it over tp."""
    tied: bool = False
    """The first and the last pipeline stage both hold this tensor: sum its gradient over both."""
    is_copy: bool = False
    """The last stage's copy of a tied tensor: trained like the first one, but never counted or saved."""

    @property
    def local_ranges(self) -> tuple[Range, ...]:
        """The global ranges along ``dim`` that this rank holds."""
        return self.ranges[self.index]

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of this rank's tensor, padding included."""
        if self.dim is None:
            return self.global_shape
        held = sum(stop - start for start, stop in self.local_ranges) + self.padding
        return (*self.global_shape[: self.dim], held, *self.global_shape[self.dim + 1 :])

    def owned_local(self) -> list[Range]:
        """Local ranges along dim 0 that count for this rank: in norms and checkpoints everything is taken once."""
        if self.is_copy:
            return []
        rows = self.global_shape[0] if self.global_shape else 1
        if self.dim is None:
            return [(0, rows)] if self.index == 0 else []
        if self.dim != 0:
            return [(0, rows)]
        owned, at = [], 0
        for piece in self.local_ranges:
            length = piece[1] - piece[0]
            if not any(piece in self.ranges[lower] for lower in range(self.index)):
                owned.append((at, at + length))
            at += length
        return owned

    def shared_local(self) -> list[tuple[Range, Range]]:
        """Pairs (local range, global range) along dim 0 of the pieces that other ranks hold too."""
        shared, at = [], 0
        for piece in self.local_ranges if self.dim == 0 else ():
            length = piece[1] - piece[0]
            if sum(piece in held for held in self.ranges) > 1:
                shared.append(((at, at + length), piece))
            at += length
        return shared

    @property
    def has_shared_ranges(self) -> bool:
        """Whether any rank of the axis holds a range that another one holds too (the same answer on every rank)."""
        pieces = [piece for held in self.ranges for piece in held]
        return len(set(pieces)) < len(pieces)

    def localise(self, full: Tensor, local: Tensor) -> None:
        """Copy this rank's part of ``full`` (the global tensor) into ``local``; padding becomes zero."""
        if self.dim is None:
            local.copy_(full)
            return
        local.zero_()
        at = 0
        for start, stop in self.local_ranges:
            local.narrow(self.dim, at, stop - start).copy_(full.narrow(self.dim, start, stop - start))
            at += stop - start


def replicated(shape: tuple[int, ...], index: int = 0, *, partial_grad: bool = False) -> ShardSpec:
    """Every rank holds the whole tensor."""
    return ShardSpec(tuple(shape), index=index, partial_grad=partial_grad)


def split(shape: tuple[int, ...], dim: int, index: int, size: int, *, padded: int | None = None) -> ShardSpec:
    """Equal contiguous parts along ``dim``; with ``padded`` the parts are those of that larger extent."""
    extent = shape[dim]
    part = (padded or extent) // size
    ranges = tuple(((min(i * part, extent), min((i + 1) * part, extent)),) for i in range(size))
    ranges = tuple(tuple(piece for piece in held if piece[0] < piece[1]) for held in ranges)
    held = sum(stop - start for start, stop in ranges[index])
    return ShardSpec(tuple(shape), dim, ranges, index, padding=part - held)


def split_fused(shape: tuple[int, ...], pieces: tuple[int, ...], index: int, size: int) -> ShardSpec:
    """Dim 0 is several matrices one after another (gate and up); every rank holds its part of each."""
    starts = [sum(pieces[:i]) for i in range(len(pieces))]
    ranges = tuple(
        tuple((start + i * (n // size), start + (i + 1) * (n // size)) for start, n in zip(starts, pieces, strict=True))
        for i in range(size)
    )
    return ShardSpec(tuple(shape), 0, ranges, index)


def split_qkv(shape: tuple[int, ...], heads: int, groups: int, head_size: int, index: int, size: int) -> ShardSpec:
    """Dim 0 is, for each key-value group, its query heads, its key head and its value head, ``head_size`` rows each.

    With fewer groups than ranks, a group's query heads are split over ranks that all hold its key and value.
    """
    if groups >= size:
        return split(shape, 0, index, size)
    sharers = size // groups
    group_rows, own_query = (heads // groups + 2) * head_size, heads // size * head_size
    ranges = []
    for i in range(size):
        base = i // sharers * group_rows
        query = base + i % sharers * own_query
        key = base + group_rows - 2 * head_size
        ranges.append(((query, query + own_query), (key, key + 2 * head_size)))
    return ShardSpec(tuple(shape), 0, tuple(ranges), index)


def spec_of(parameter: nn.Parameter) -> ShardSpec:
    """The parameter's ``ShardSpec``; a parameter without one is whole on every rank."""
    spec = getattr(parameter, "shard_spec", None)
    return spec if spec is not None else replicated(tuple(parameter.shape))


def allocate(spec: ShardSpec, dtype: torch.dtype, device: torch.device | str) -> nn.Parameter:
    """An uninitialised parameter that carries its ``ShardSpec``."""
    parameter = nn.Parameter(torch.empty(spec.local_shape, dtype=dtype, device=device))
    parameter.shard_spec = spec
    return parameter


def amend_spec(parameter: nn.Parameter, **changes) -> None:
    """Replace fields of the parameter's ``ShardSpec``."""
    parameter.shard_spec = replace(spec_of(parameter), **changes)


@torch.no_grad()
def initialise(parameter: nn.Parameter, init_method: Callable[[Tensor], object]) -> None:
    """Draw the global tensor from torch's CPU generator and keep this rank's part.

    The draw is in float32 on the CPU whatever the parameter's dtype and device, so that ranks which share a seed hold
    parts of one and the same tensor.
    """
    spec = spec_of(parameter)
    drawn = torch.empty(spec.global_shape, dtype=torch.float32)
    init_method(drawn)
    spec.localise(drawn.to(parameter.dtype), parameter.data)


def initialise_by_name(parameter: nn.Parameter, init_method: Callable[[Tensor], object], seed: int, name: str) -> None:
    """As ``initialise``, from a generator that depends on the seed and the global name alone."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(name_seed(seed, name))  # the CPU's alone
        initialise(parameter, init_method)


def name_seed(seed: int, name: str) -> int:
    """A 63-bit seed from a seed and a name."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "little") >> 1
