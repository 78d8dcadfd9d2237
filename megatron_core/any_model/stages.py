"""Stages of any model on the ranks of a pipeline: the owners of their parameters, and equal weights on all copies."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_core.parallel.collectives import broadcast_
from megatron_core.parallel.groups import Group, ParallelGroups
from megatron_core.parallel.sharding import amend_spec, replicated

Call = Callable[[Any], Any]


@dataclass(frozen=True)
class ParameterPlace:
    """The stages that use a parameter."""

    name: str
    """Its first name in the whole model."""
    stages: tuple[int, ...]


class ModelStage(nn.Module):
    """A stage of a model: ``run(batch, received)`` computes it, and ``modules`` have its parameters.

    ``named`` are its parameters by their names in the whole model; parameters that another stage of this rank has
    already belong to that stage.
    """

    def __init__(
        self, run: Callable[..., Any], modules: Iterable[nn.Module], named: Sequence[tuple[str, nn.Parameter]]
    ) -> None:
        super().__init__()
        self.parts = nn.ModuleList(modules)
        self._run = run
        self._named = list(named)

    def named_global_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters by their names in the whole model."""
        yield from self._named

    def forward(self, batch: Any, received: Any) -> Any:
        """Return the output for a micro-batch; ``received``: the output of the stage before, None on the first."""
        return self._run(batch, received)

    def borrowed(self, mine: set[nn.Parameter]) -> list[nn.Module]:
        """Return the parts with parameters that belong to another stage of this rank; ``mine``: those of this stage."""
        return [module for module in self.parts if any(p not in mine for p in module.parameters())]


class Staged(Protocol):
    """A model that is divided into stages."""

    places: dict[nn.Parameter, ParameterPlace]
    """This rank's parameters."""

    def owns_buffer(self, name: str) -> bool:
        """Whether this pipeline rank is the first one whose stages use a buffer of the whole model."""

    def make_stages(self) -> tuple[dict[int, ModelStage], dict[int, list[list[nn.Module]]]]:
        """Return this rank's stages, and the modules of their units of data parallelism."""


def tied_sets(stages: Iterable[Sequence[int]], stage_to_rank: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the sets of several pipeline ranks that hold common parameters, in one order on all ranks."""
    sets = {ranks_of(numbers, stage_to_rank) for numbers in stages}
    return sorted(ranks for ranks in sets if len(ranks) > 1)


def ranks_of(stages: Sequence[int], stage_to_rank: Sequence[int]) -> tuple[int, ...]:
    """Return the pipeline ranks of stages, in ascending order."""
    return tuple(sorted({stage_to_rank[stage] for stage in stages}))


def mark_tied(
    places: Mapping[nn.Parameter, ParameterPlace], stage_to_rank: Sequence[int], groups: ParallelGroups
) -> None:
    """Record in the ``ShardSpec`` of parameters which pipeline ranks hold them; the first stage's copy counts."""
    for parameter, holder in places.items():
        ranks = ranks_of(holder.stages, stage_to_rank)
        if not hasattr(parameter, "shard_spec"):
            attributes: Any = parameter
            attributes.shard_spec = replicated(tuple(parameter.shape), groups.index("tp"))
        if len(ranks) > 1:
            amend_spec(parameter, tied=ranks, is_copy=stage_to_rank[min(holder.stages)] != groups.index("pp"))


@torch.no_grad()
def equalize(
    places: Mapping[nn.Parameter, ParameterPlace],
    buffers: Iterable[Tensor],
    stage_to_rank: Sequence[int],
    groups: ParallelGroups,
) -> None:
    """Make copies equal: tied parameters to those of their first stage, and all to the first rank of each stage."""
    pipeline = groups.ranks("pp")
    for parameter, holder in sorted(places.items(), key=lambda item: item[1].name):
        ranks = ranks_of(holder.stages, stage_to_rank)
        if len(ranks) > 1:
            _copy_from(parameter, pipeline[stage_to_rank[min(holder.stages)]], groups.tied(ranks))
    for tensor in [*places, *buffers]:
        _copy_from(tensor, groups.ranks("tp-dp")[0], groups.group("tp-dp"))


def _copy_from(tensor: Tensor, source: int, group: Group) -> None:
    if not tensor.is_meta and dist.is_initialized():
        contiguous = tensor.detach().contiguous()
        broadcast_(contiguous.view(torch.uint8) if contiguous.dtype == torch.bool else contiguous, source, group)
        tensor.copy_(contiguous)
