"""Units of a stage, as data: modules whose parameters are gathered, freed and reduced together."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any

from torch import Tensor, nn

from megatron_core.data_parallel.buffer import Bucket


@dataclass(frozen=True, eq=False)
class Unit:
    """Modules that are gathered, freed and reduced together."""

    number: int
    own: Sequence[Bucket]
    """Buckets with the unit's parameters; they are reduced after the unit's backward."""
    reads: Sequence[Bucket]
    """Buckets whose weights the unit's forward and backward read: its own, and those with tied weights of another
    unit.
    """


@dataclass(frozen=True)
class UnitOptions:
    """Time of communication and lifetime of gathered weights; results do not depend on them."""

    overlap_grad_reduce: bool = False
    """Whether a unit's gradients are reduced during the next unit's backward."""
    overlap_param_gather: bool = False
    """Whether the next unit is gathered during this unit's computation."""
    keep_after_forward: bool = False
    """Whether weights stay in memory from their first use to the end of the step."""
    ranks_may_differ: bool = False
    """Whether ranks may run different units, so that split backwards, too, sum all units in one order."""


def buckets_of_unit(
    number: int, modules: Sequence[nn.Module], buckets: Sequence[Bucket], bucket_of: Mapping[nn.Parameter, Bucket]
) -> tuple[list[Bucket], list[Bucket]]:
    """Return a unit's own buckets, and all buckets that contain parameters of its modules."""
    own = [bucket for bucket in buckets if bucket.unit == number]
    read = [bucket_of[p] for module in modules for p in module.parameters() if p in bucket_of]
    return own, list(dict.fromkeys(own + read))


def tensors_in(output: Any) -> Iterator[Tensor]:
    """Yield the tensors in a module's output."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        yield from tensors_in(list(output.values()))
    elif isinstance(output, Iterable) and not isinstance(output, str):
        for each in output:
            yield from tensors_in(each)
    elif is_dataclass(output) and not isinstance(output, type):
        yield from tensors_in(list(vars(output).values()))
