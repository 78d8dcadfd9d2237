"""A grid of ranks with named dimensions, and process groups over its dimensions."""

import os
from dataclasses import dataclass, field
from math import prod
from numbers import Integral
from typing import Any

import torch
import torch.distributed as dist

from megatron_core.errors import ConfigError, LayoutError
from megatron_core.launcher import read_integer

_BASE = "base"


def _is_process_group_member(pg: Any) -> bool:
    """Whether this rank belongs to a group that ``torch.distributed`` returned."""
    return pg is not None and pg is not dist.GroupMember.NON_GROUP_MEMBER


@dataclass
class _View:
    """A factorization of the ranks."""

    name: str
    shape: list[int]
    dim_names: list[str]
    shared_dims: list[str] = field(default_factory=list)

    def ordered(self, dims: str | list[str]) -> list[str]:
        """Return ``dims`` from the slowest to the fastest."""
        for dim in wanted if isinstance(wanted := dims, list) else [dims]:
            if dim not in self.dim_names:
                raise ConfigError(f"{dim!r} is not in view {self.name!r}, which has {self.dim_names}")
        return [dim for dim in reversed(self.dim_names) if dim in dims] if isinstance(dims, list) else [dims]

    def ranks(self, dims: list[str], offset: int) -> list[list[int]]:
        """Return the groups of ranks that differ only on ``dims``, the last of which is the fastest within a group."""
        order = [*(dim for dim in reversed(self.dim_names) if dim not in dims), *dims]
        grid = torch.arange(offset, offset + prod(self.shape)).view(*reversed(self.shape))
        axes = [len(self.shape) - 1 - self.dim_names.index(dim) for dim in order]
        inner = prod(self.shape[self.dim_names.index(dim)] for dim in dims)
        return grid.permute(axes).reshape(-1, inner).tolist()


class HyperCommGrid:
    """Ranks ``rank_offset ...`` as a grid of the given ``shape``, the fastest dimension first, as in ``rank_order``.

    ``register_view`` adds other factorizations of the same ranks, such as that of experts. ``create_pg`` creates groups
    and ``get_pg`` returns them. Errors: ValueError; LayoutError (a RuntimeError) if the grid is larger than the world;
    KeyError for groups that already exist or do not exist.
    """

    def __init__(
        self, shape: list[int], dim_names: list[str], rank_offset: int = 0, backend: str | None = None
    ) -> None:
        if len(shape) != len(dim_names):
            raise ConfigError(f"len(shape) {shape} != len(dim_names) {dim_names}; name every dimension")
        if rank_offset < 0:
            raise ConfigError(f"rank_offset must be non-negative, got {rank_offset}")
        self.shape, self.dim_names = list(shape), list(dim_names)
        self.rank_offset, self.backend, self.size = rank_offset, backend, prod(shape)
        world = _world_size()
        if self.size > world - rank_offset:
            raise LayoutError(f"Grid shape {shape} is over sized with world size {world} and rank offset {rank_offset}")
        self._views = {_BASE: _View(_BASE, self.shape, self.dim_names)}
        self._pgs: dict[str | tuple[str, tuple[str, ...]], Any] = {}

    def register_view(
        self, name: str, shape: list[int], dim_names: list[str], shared_dims: list[str] | None = None
    ) -> None:
        """Add a factorization; dimensions shared with the base view must have the same groups in both."""
        shared = list(shared_dims or ())
        view, base = _View(name, list(shape), list(dim_names), shared), self._views[_BASE]
        problems = [
            (name in self._views, f"View {name!r} is already registered"),
            (len(shape) != len(dim_names), f"len(shape) {shape} != len(dim_names) {dim_names}"),
            (len(set(dim_names)) != len(dim_names), f"View {name!r} has duplicate dim_names: {dim_names}"),
            (
                any(not isinstance(n, Integral) or n <= 0 for n in shape),
                f"View {name!r} shape must be positive ints, got {shape}",
            ),
            (prod(shape) != self.size, f"View {name!r} shape {shape}, but the grid size is {self.size}"),
            (len(set(shared)) != len(shared), f"View {name!r} has duplicate shared_dims: {shared}"),
        ]
        for dim in shared:
            missing = f"Shared dim {dim!r} of view {name!r} is not in the"
            problems.append((dim not in self.dim_names, f"{missing} base view {self.dim_names}"))
            problems.append((dim not in dim_names, f"{missing} view's dim_names {dim_names}"))
        for wrong, message in problems:
            if wrong:
                raise ConfigError(message)
        for dims in [*([dim] for dim in shared), *([shared] if len(shared) > 1 else [])]:
            if view.ranks(view.ordered(dims), 0) != base.ranks(base.ordered(dims), 0):
                what = f"Shared dims {dims!r} have" if len(dims) > 1 else f"Shared dim {dims[0]!r} has"
                raise ConfigError(f"{what} different membership across views {_BASE!r} and {name!r}")
        self._views[name] = view

    def create_pg(self, dims: str | list[str], *, view: str | None = None, **kwargs: Any) -> Any:
        """Create the groups over ``dims`` and return this rank's; a collective call."""
        key, owner, ordered = self._find(dims, view)
        if key in self._pgs:
            where = "" if isinstance(key, str) else f" for view {view!r}"
            raise KeyError(f"Process group {dims}{where} has already been created; use get_pg")
        ranks = owner.ranks(ordered, self.rank_offset)
        self._pgs[key], _ = dist.new_subgroups_by_enumeration(ranks, backend=self.backend, **kwargs)
        return self._pgs[key]

    def get_pg(self, dims: str | list[str], *, view: str | None = None) -> Any:
        """Return this rank's group over ``dims``."""
        key, _, _ = self._find(dims, view)
        if key not in self._pgs:
            what = key if isinstance(key, str) else f"{dims} for view {view!r}"
            preposition = "for " if isinstance(key, str) else ""
            raise KeyError(f"Process group {preposition}{what} hasn't been created. Call create_pg first.")
        return self._pgs[key]

    def get_rank_enum(self, dims: str | list[str], *, view: str | None = None) -> list[list[int]]:
        """Return the ranks of all groups over ``dims``."""
        found = self._view(view)
        return found.ranks(found.ordered(dims), self.rank_offset)

    def _gen_rank_enum(self, dims: list[str]) -> list[list[int]]:
        """Return the ranks of all groups over ``dims``, in their order."""
        return self._views[_BASE].ranks(dims, self.rank_offset)

    def _order_dims_for(self, dim_names: list[str], dims: str | list[str]) -> tuple[list[str], str]:
        """Return ``dims`` in the order of groups, from the slowest, and their key."""
        ordered = _View(_BASE, [1] * len(dim_names), list(dim_names)).ordered(dims)
        return ordered, "-".join(ordered)

    def destroy(self) -> None:
        """Destroy the groups of this rank."""
        for group in {id(pg): pg for pg in self._pgs.values()}.values():
            if _is_process_group_member(group):
                dist.destroy_process_group(group)
        self._pgs.clear()

    def _view(self, name: str | None) -> _View:
        if (name or _BASE) not in self._views:
            raise KeyError(f"View {name!r} is not registered; there are {list(self._views)}")
        return self._views[name or _BASE]

    def _find(self, dims: str | list[str], view: str | None) -> tuple[Any, _View, list[str]]:
        """Return the key of a group, its view, and its ordered dimensions; shared ones belong to the base view."""
        found = self._view(view)
        ordered = found.ordered(dims)
        base = self._views[_BASE]
        if found is base or all(dim in found.shared_dims for dim in ordered):
            ordered = base.ordered(ordered)
            return "-".join(ordered), base, ordered
        return (found.name, tuple(ordered)), found, ordered


def _world_size() -> int:
    if "WORLD_SIZE" in os.environ:
        return read_integer("WORLD_SIZE", 1, least=1)
    if dist.is_initialized():
        return dist.get_world_size()
    raise LayoutError("Cannot determine world size: initialize torch.distributed or set WORLD_SIZE")
