"""Division of a stage's parameters into units and buckets."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from megatron_core.data_parallel.bucket_kind import BucketKind
from megatron_core.data_parallel.bucket_layout import BucketLayout, InOrder, Packer, Rule, WholeInShards, matrix_work
from megatron_core.data_parallel.buffer import Bucket, Initialise
from megatron_core.data_parallel.placement import Placement
from megatron_core.parallel.groups import Group, ParallelGroups
from megatron_core.parallel.sharding import replicated, spec_of

SHARD_MULTIPLE = 8
"""A shard's length is a multiple of this number of elements: shards start at 16 bytes for vectorised kernels."""


def in_order(kind: BucketKind, shards: int) -> Rule:
    """Return the default rule: parameters in order, shards aligned to 16 bytes."""
    return InOrder(1, shards * SHARD_MULTIPLE)


def whole_matrices(kind: BucketKind, shards: int) -> Rule:
    """Return the rule for filling buckets such that no shard cuts a hidden matrix."""
    return WholeInShards(shards, 1, SHARD_MULTIPLE) if kind.is_hidden_matrix else in_order(kind, shards)


def whole_parameters(kind: BucketKind, shards: int) -> Rule:
    """Return the rule for filling buckets such that no shard cuts a parameter."""
    return WholeInShards(shards, 1, SHARD_MULTIPLE)


def make_buckets(
    units: Iterable[Sequence[tuple[str, nn.Parameter]]],
    stage: int,
    groups: ParallelGroups,
    *,
    bucket_size: int,
    zero_stage: int,
    device: torch.device | None = None,
    initialise: Initialise | None = None,
    away: Callable[[], Placement] | None = None,
    rule_of: Callable[[BucketKind, int], Rule] = in_order,
    join: Callable[[BucketKind], BucketKind] | None = None,
    frozen: bool = False,
    exact_sums: bool = False,
) -> list[Bucket]:
    """Fill buckets of about ``bucket_size`` elements with parameters of the same kind, the last registered first.

    Backward finishes the last layers first, so the first buckets are complete first. ``units`` are the named parameters
    of the stage's units (embedding, each layer, head). From ``zero_stage`` 2 on a unit is reduced, gathered and freed
    as a whole, so no bucket contains parameters of two units. ``rule_of(kind, shards)`` returns the rule that fills
    buckets; by default parameters are placed in order. Kinds with equal ``join(kind)`` share buckets. A tied
    parameter, and from stage 1 on one marked ``shared_embedding``, gets a bucket of its own. With ``frozen``,
    return buckets of the matrices that are not trained.
    """
    # Open packers by kind, and the ranks that share each kind.
    packers: dict[BucketKind, Packer[tuple[str, nn.Parameter]]] = {}
    ranks: dict[BucketKind, tuple[Group, Group]] = {}
    buckets: list[Bucket] = []

    def make(kind: BucketKind, unit: int, named: list[tuple[str, nn.Parameter]], layout: BucketLayout) -> None:
        dp_group, instances = ranks[kind]
        buckets.append(
            Bucket(
                named,
                layout,
                kind,
                stage,
                dp_group,
                zero_stage,
                device=device,
                unit=unit,
                instances=instances,
                initialise=initialise,
                away=away() if away is not None else None,
                exact_sums=exact_sums,
            )
        )

    def close_all(unit: int) -> None:
        for kind, packer in packers.items():
            for last in packer.close():
                make(kind, unit, *last)
        packers.clear()

    # Visit units and parameters in reverse order, so that the first bucket is complete first in backward.
    number = 0
    for number, unit in reversed(list(enumerate(units))):
        for name, parameter in reversed([pair for pair in unit if pair[1].requires_grad != frozen]):
            kind = BucketKind.of(parameter, groups)
            if frozen and not kind.matrix:  # vectors are small, and steps may change them (expert bias)
                continue
            kind = kind if join is None else join(kind)
            if kind not in packers:
                axes = "-".join(kind.replica_axes)
                ranks[kind] = groups.shard_group(axes), groups.instance_group(axes)
                packers[kind] = Packer(rule_of(kind, ranks[kind][0].size()), bucket_size)
            alone = bool(kind.tied) or (zero_stage > 0 and getattr(parameter, "shared_embedding", False))
            cost = matrix_work(spec_of(parameter).global_shape)  # the same on every rank
            for full in packers[kind].add((name, parameter), parameter.numel(), cost, alone=alone):
                make(kind, number, *full)
        if zero_stage >= 2:
            close_all(number)
    close_all(number)
    return buckets


def modules_of(module: nn.Module) -> list[list[nn.Module]]:
    """Return the modules of a stage's units: the list of its ``units()``, else each child, else the stage itself."""
    declared: Any = getattr(module, "units", None)
    units = [[child] for child in module.children()] if declared is None else declared()
    return units or [[module]]


def units_of(
    module: nn.Module, groups: ParallelGroups, units: list[list[nn.Module]] | None = None, *, has_rest: bool = False
) -> list[list[tuple[str, nn.Parameter]]]:
    """Return a stage's named parameters by unit; ``units`` are the modules of each (default: ``modules_of``).

    A parameter in no unit belongs to the first unit, which with ``has_rest`` has no other parameters and precedes
    ``units``; a parameter in several units belongs to the first of them. Parameters
    without a ``ShardSpec`` get the spec of a tensor that is whole on every rank; ``allreduce=False`` marks parameters
    of experts, which only expert-data-parallel ranks share.
    """
    units = ([[]] if has_rest else []) + (modules_of(module) if units is None else units)
    number = {p: i for i, modules in reversed(list(enumerate(units))) for m in modules for p in m.parameters()}
    result: list[list[tuple[str, nn.Parameter]]] = [[] for _ in units]
    for name, parameter in global_parameters(module):
        if not hasattr(parameter, "shard_spec"):
            expert = not getattr(parameter, "allreduce", True)
            axis = "etp" if expert else "tp"
            spec = replicated(tuple(parameter.shape), groups.index(axis), axis=axis)
            parameter.shard_spec = replace(spec, replica_axes=("edp",)) if expert else spec
        result[number.get(parameter, 0)].append((name, parameter))
    return result


def name_units(module: nn.Module, units: Sequence[Sequence[nn.Module]], *, has_rest: bool) -> Iterable[tuple[int, str]]:
    """Yield the number of each unit of a stage, as in ``units_of``, and the names of its modules."""
    if has_rest:
        yield 0, "the parameters outside of all units"
    name_of = {inner: name for name, inner in module.named_modules()}
    for number, modules in enumerate(units, start=int(has_rest)):
        yield number, ", ".join(name_of.get(each) or "the model" for each in modules)


def global_parameters(module: nn.Module) -> Iterable[tuple[str, nn.Parameter]]:
    """Return the parameters by global name if the model has global names, else by local name."""
    named = getattr(module, "named_global_parameters", module.named_parameters)
    return named()
