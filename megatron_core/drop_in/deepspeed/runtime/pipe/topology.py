"""Ranks as coordinates on named axes, the last of which changes fastest."""

from collections import namedtuple
from collections.abc import Sequence
from itertools import product
from math import prod
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from deepspeed.runtime.config_utils import reader
from megatron_core import parallel_state
from megatron_core.errors import LayoutError
from megatron_core.parallel.groups import LocalGroup


def _prime_factors(N: int) -> list[int]:
    """Return the prime factors of ``N`` in rising order; ``ValueError`` below 1."""
    if N <= 0:
        raise ValueError(f"N={N} must be positive")
    found, factor = [], 2
    while N > 1:
        while N % factor == 0:
            found.append(factor)
            N //= factor
        factor += 1
    return found


def _default_topology(ranks: int) -> "PipeDataParallelTopology":
    factors = _prime_factors(ranks)
    return PipeDataParallelTopology(prod(factors[::2]), prod(factors[1::2]))


def _coordinates_of(axes: list[str]) -> Any:
    make: Any = namedtuple
    return make("ProcessCoord", axes)


class ProcessTopology:
    """Ranks of a grid with the sizes ``dims`` on ``axes``; ``mapping`` has the rank of each coordinate."""

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        self.axes, self.dims = list(axes), list(dims)
        self.ProcessCoord: Any = _coordinates_of(self.axes)
        coordinates = product(*(range(size) for size in self.dims))
        self.mapping = {self.ProcessCoord(*each): rank for rank, each in enumerate(coordinates)}
        self._coordinates = list(self.mapping)

    def get_rank(self, **coord_kwargs: int) -> int:
        """Return the rank at a coordinate, which all axes give. ``ValueError`` for a missing axis."""
        if len(coord_kwargs) != len(self.axes):
            raise ValueError("get_rank() needs the coordinate on every axis; use filter_match() for some of them")
        return self.mapping[self.ProcessCoord(**coord_kwargs)]

    def get_axis_names(self) -> list[str]:
        """Return the names of the axes."""
        return self.axes

    def get_rank_repr(
        self, rank: int, omit_axes: Sequence[str] = ("data", "pipe"), inner_sep: str = "_", outer_sep: str = "-"
    ) -> str:
        """Return a rank's coordinates as text such as ``model_00``, without ``omit_axes``."""
        shown = [axis for axis in self.axes if axis not in frozenset(omit_axes)]
        return outer_sep.join(f"{axis}{inner_sep}{getattr(self.get_coord(rank), axis):02d}" for axis in shown)

    def get_dim(self, axis: str) -> int:
        """Return the size of an axis; 0 if the axis does not exist."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def get_coord(self, rank: int) -> Any:
        """Return the coordinate of a rank. ``ValueError`` for a rank outside of the grid."""
        if not 0 <= rank < len(self._coordinates):
            raise ValueError(f"rank {rank} not found in topology.")
        return self._coordinates[rank]

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """Return the groups of ranks that differ only on ``axis``; [] if the axis does not exist."""
        if axis not in self.axes:
            return []
        groups: dict[Any, list[int]] = {}
        for coordinate, rank in self.mapping.items():
            groups.setdefault(coordinate._replace(**{axis: 0}), []).append(rank)
        return list(groups.values())

    def filter_match(self, **filter_kwargs: int) -> list[int]:
        """Return the ranks with these coordinates."""
        return [
            rank
            for coordinate, rank in self.mapping.items()
            if all(getattr(coordinate, axis) == value for axis, value in filter_kwargs.items())
        ]

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """Return the ranks at ``idx`` of ``axis``."""
        return self.filter_match(**{axis: idx})

    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.mapping)

    def __str__(self) -> str:
        return str(self.mapping)


class PipeDataParallelTopology(ProcessTopology):
    """Pipeline stages, each with neighbouring data-parallel ranks."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data"], [num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """Pipeline stages of data-parallel groups of model-parallel ranks."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data", "model"], [num_pp, num_dp, num_mp])


class PipelineParallelGrid:
    """This rank in a topology, under the names of Megatron's ``mpu``.

    Without a topology, the number of ranks is divided into stages and copies: every other prime factor each. A group is
    ``initialize``'s; before, the first call of its ranks makes it.
    """

    def __init__(self, topology: ProcessTopology | None = None, process_group: Any = None) -> None:
        self.global_rank = dist.get_rank() if dist.is_initialized() else 0
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        self._topo = _default_topology(self.world_size) if topology is None else topology
        if not self._is_grid_valid():
            raise LayoutError(
                f"the topology has {self._topo.world_size()} ranks, and the job has {self.world_size}; start "
                f"{self._topo.world_size()} processes, or change the topology"
            )
        self.pipe_parallel_size = max(self._topo.get_dim("pipe"), 1)
        self.data_parallel_size = max(self._topo.get_dim("data"), 1)
        self.model_parallel_size = max(self._topo.get_dim("model"), 1)
        self.stage_id, self.data_parallel_id = self._own("pipe"), self._own("data")
        self.is_first_stage, self.is_last_stage = self.stage_id == 0, self.stage_id == self.pipe_parallel_size - 1

        self.dp_group, self.pp_group = self._ranks("data"), self._ranks("pipe")
        self._made: dict[str, ProcessGroup] = {}

    def _is_grid_valid(self) -> bool:
        return self._topo.world_size() == self.world_size

    def _ranks(self, axis: str) -> list[int]:
        lists = self._topo.get_axis_comm_lists(axis)
        return next((ranks for ranks in lists if self.global_rank in ranks), [self.global_rank])

    def _group(self, axis: str, name: str) -> ProcessGroup:
        if parallel_state.is_initialized():
            found = parallel_state.current().group(name)
            if not isinstance(found, LocalGroup) and dist.get_process_group_ranks(found) == self._ranks(axis):
                return found
        if axis not in self._made:
            self._made[axis] = dist.new_group(self._ranks(axis), use_local_synchronization=True)
        return self._made[axis]

    def _own(self, axis: str) -> int:
        return int(getattr(self._topo.get_coord(self.global_rank), axis, 0))

    def topology(self) -> ProcessTopology:
        """Return the topology."""
        return self._topo

    def stage_to_global(self, stage_id: int, **kwargs: int) -> int:
        """Return the rank of a stage that has this rank's other coordinates, or those given."""
        own = self._topo.get_coord(self.global_rank)._asdict() | {"pipe": stage_id} | kwargs
        return self._topo.get_rank(**own)

    get_global_rank = reader("global_rank", "Rank in the job.")
    get_stage_id = reader("stage_id", "Pipeline stage of this rank.")
    get_data_parallel_id = reader("data_parallel_id", "Index among the ranks with the same stage.")
    get_pipe_parallel_world_size = reader("pipe_parallel_size", "Number of stages.")
    get_data_parallel_world_size = reader("data_parallel_size", "Number of copies of the model.")
    get_data_parallel_group_ranks = reader("dp_group", "Ranks with the same stage.")
    get_model_parallel_world_size = reader("model_parallel_size", "Number of ranks that split a stage's layers.")

    def get_model_parallel_rank(self) -> int:
        """Index among the ranks that split a stage's layers."""
        return self._own("model")

    def get_pipe_parallel_group(self) -> ProcessGroup:
        """Ranks of a pipeline."""
        return self._group("pipe", "pp")

    def get_data_parallel_group(self) -> ProcessGroup:
        """Ranks with the same stage."""
        return self._group("data", "dp")

    def get_model_parallel_group(self) -> ProcessGroup:
        """Ranks that split a stage's layers."""
        return self._group("model", "tp")

    get_pipe_parallel_rank = get_pipeline_model_parallel_rank = get_stage_id
    get_pipeline_model_parallel_world_size = get_pipe_parallel_world_size
    get_data_parallel_rank = get_data_parallel_id
    get_slice_parallel_rank = get_tensor_model_parallel_rank = get_model_parallel_rank
    get_slice_parallel_world_size = get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_slice_parallel_group = get_model_parallel_group
