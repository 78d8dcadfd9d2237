"""Division of a stage into units and buckets, whose parameters are gathered, freed and reduced together."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from typing import Any, Protocol

from torch import Tensor, nn

from megatron_core.data_parallel.bucket_layout import BucketLayout, Packer, matrix_work
from megatron_core.data_parallel.buffer import Bucket
from megatron_core.data_parallel.memory import BucketMemory
from megatron_core.data_parallel.settings import BucketKind, DataParallelSettings
from megatron_core.parallel.groups import Group, ParallelGroups
from megatron_core.parallel.sharding import replicated, spec_of


def make_buckets(
    units: Iterable[Sequence[tuple[str, nn.Parameter]]],
    stage: int,
    groups: ParallelGroups,
    settings: DataParallelSettings,
    memory: BucketMemory,
    *,
    frozen: bool = False,
) -> list[Bucket]:
    """Fill buckets with parameters of the same kind, the last registered first.

    Backward finishes the last layers first, so the first buckets are complete first. ``units`` are the named parameters
    of the stage's units (embedding, each layer, head). From ZeRO stage 2 on a unit is reduced, gathered and freed as a
    whole, so no bucket contains parameters of two units. A tied parameter, and from stage 1 on one marked
    ``shared_embedding``, gets a bucket of its own. With ``frozen``, return buckets of the matrices that are not
    trained.
    """
    # Open packers by kind, and the ranks that share each kind.
    packers: dict[BucketKind, Packer[tuple[str, nn.Parameter]]] = {}
    ranks: dict[BucketKind, tuple[Group, Group]] = {}
    buckets: list[Bucket] = []

    def make(bucket_kind: BucketKind, unit: int, named: list[tuple[str, nn.Parameter]], layout: BucketLayout) -> None:
        dp_group, instances = ranks[bucket_kind]
        buckets.append(
            Bucket(
                named,
                layout,
                bucket_kind,
                settings,
                memory,
                stage=stage,
                unit=unit,
                dp_group=dp_group,
                instances=instances,
            )
        )

    def close_all(unit: int) -> None:
        for bucket_kind, packer in packers.items():
            for bucket_content in packer.close():
                make(bucket_kind, unit, *bucket_content)
        packers.clear()

    # Visit units and parameters in reverse order, so that the first bucket is complete first in backward.
    number = 0
    for number, unit in reversed(list(enumerate(units))):
        for name, parameter in reversed([pair for pair in unit if pair[1].requires_grad != frozen]):
            bucket_kind = BucketKind.of(parameter, groups)
            persistent = settings.zero_stage == 3 and parameter.numel() <= settings.persistence_threshold
            # Vectors are small, and steps may change them (expert bias).
            if frozen and (persistent or not bucket_kind.matrix):
                continue
            bucket_kind = replace(bucket_kind, persistent=persistent)
            bucket_kind = bucket_kind if settings.join is None else settings.join(bucket_kind)
            if bucket_kind not in packers:
                axes = "-".join(bucket_kind.replica_axes)
                ranks[bucket_kind] = groups.shard_group(axes), groups.instance_group(axes)
                rule = settings.rule_of(bucket_kind, ranks[bucket_kind][0].size())
                packers[bucket_kind] = Packer(rule, settings.bucket_size)
            is_shared = settings.zero_stage > 0 and getattr(parameter, "shared_embedding", False)
            # Ranks of several stages sum it together, and the other parameters of a bucket would differ there.
            alone = bool(bucket_kind.tied) or is_shared
            cost = matrix_work(spec_of(parameter).global_shape)  # the same on every rank
            for full in packers[bucket_kind].add((name, parameter), parameter.numel(), cost, alone=alone):
                make(bucket_kind, number, *full)
        # Otherwise the gradients of a unit would wait for those of the unit before it in backward.
        if settings.zero_stage >= 2:
            close_all(number)
    close_all(number)
    return buckets


def modules_of_units(module: nn.Module) -> list[list[nn.Module]]:
    """Return the modules of a stage's units: the list of its ``units()``, else each child, else the stage itself."""
    declared: Any = getattr(module, "units", None)
    units = [[child] for child in module.children()] if declared is None else declared()
    return units or [[module]]


def units_of(
    module: nn.Module, groups: ParallelGroups, units: list[list[nn.Module]] | None = None, *, has_rest: bool = False
) -> list[list[tuple[str, nn.Parameter]]]:
    """Return a stage's named parameters by unit; ``units`` are the modules of each (default: ``modules_of_units``).

    A parameter in no unit belongs to the first unit, which with ``has_rest`` has no other parameters and precedes
    ``units``; then so does a parameter that a module outside of ``units`` shares, such as a head tied to an embedding.
    A parameter in several units belongs to the first of them. Parameters without a ``ShardSpec`` get the spec of a
    tensor that is whole on every rank; ``allreduce=False`` marks parameters of experts, which only
    expert-data-parallel ranks share.
    """
    units = ([[]] if has_rest else []) + (modules_of_units(module) if units is None else units)
    # Reversed, so that the first unit with a parameter wins.
    number = {p: i for i, modules in reversed(list(enumerate(units))) for m in modules for p in m.parameters()}
    if has_rest:
        inside = {inner for modules in units for m in modules for inner in m.modules()}
        number |= {p: 0 for m in module.modules() if m not in inside for p in m.parameters(recurse=False)}
    result: list[list[tuple[str, nn.Parameter]]] = [[] for _ in units]
    for name, parameter in global_parameters(module):
        if not hasattr(parameter, "shard_spec"):
            # Megatron's mark for parameters of experts.
            expert = not getattr(parameter, "allreduce", True)
            axis = "etp" if expert else "tp"
            spec = replicated(tuple(parameter.shape), groups.index(axis), axis=axis)
            parameter.shard_spec = replace(spec, replica_axes=("edp",)) if expert else spec
        result[number.get(parameter, 0)].append((name, parameter))
    return result


def global_parameters(module: nn.Module) -> Iterable[tuple[str, nn.Parameter]]:
    """Return the parameters by global name if the model has global names, else by local name."""
    named = getattr(module, "named_global_parameters", module.named_parameters)
    return named()


class Announced(Protocol):
    """The handle of an announcement, such as ``any_model.agreement.Announcement``."""

    def wait(self) -> None:
        """Wait until all ranks have announced the same."""


@dataclass(frozen=True, eq=False)
class Unit:
    """Modules that are gathered, freed and reduced together."""

    number: int
    own: Sequence[Bucket]
    """Buckets with the unit's parameters; they are reduced after the unit's backward."""
    reads: Sequence[Bucket]
    """Buckets with shards of weights that the unit's forward and backward read: its own, and those with tied weights of
    another unit."""


def buckets_of_unit(
    number: int, modules: Sequence[nn.Module], buckets: Sequence[Bucket], bucket_of: Mapping[nn.Parameter, Bucket]
) -> tuple[list[Bucket], list[Bucket]]:
    """Return a unit's own buckets, and all buckets with shards of weights of its modules."""
    own_buckets = [bucket for bucket in buckets if bucket.unit == number]
    buckets_read = [bucket_of[p] for module in modules for p in module.parameters() if p in bucket_of]
    return own_buckets, sharded_weights(own_buckets + buckets_read)


def sharded_weights(buckets: Iterable[Bucket]) -> list[Bucket]:
    """The buckets whose weights are gathered before they are read."""
    return list(dict.fromkeys(bucket for bucket in buckets if bucket.splits_weights))


def tensors_in(output: Any) -> Iterator[Tensor]:
    """Yield the tensors in a module's output."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        yield from tensors_in(list(output.values()))
    elif isinstance(output, Iterable) and not isinstance(output, str):
        for value in output:
            yield from tensors_in(value)
    elif is_dataclass(output) and not isinstance(output, type):
        yield from tensors_in(list(vars(output).values()))
