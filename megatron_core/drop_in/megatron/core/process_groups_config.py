"""A rank's process groups as one object."""

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

from megatron_core import parallel_state
from megatron_core.errors import ConfigError

_GETTERS = {
    "tp": lambda: parallel_state.get_tensor_model_parallel_group(False),
    "pp": lambda: parallel_state.get_pipeline_model_parallel_group(False),
    "mp": lambda: parallel_state.get_model_parallel_group(False),
    "embd": lambda: parallel_state.get_embedding_group(False),
    "pos_embd": lambda: parallel_state.get_position_embedding_group(False),
    "cp": lambda: parallel_state.get_context_parallel_group(False),
    "tp_cp": lambda: parallel_state.get_tensor_and_context_parallel_group(False),
    "hcp": lambda: parallel_state.get_hierarchical_context_parallel_groups(False),
    "ep": lambda: parallel_state.get_expert_model_parallel_group(False),
    "expt_tp": lambda: parallel_state.get_expert_tensor_parallel_group(False),
    "tp_ep": lambda: parallel_state.get_expert_tensor_and_model_parallel_group(False),
    "tp_ep_pp": lambda: parallel_state.get_expert_tensor_model_pipeline_parallel_group(False),
    "tp_dp_cp": lambda: parallel_state.get_tensor_and_data_parallel_group(False, with_context_parallel=True),
    "dp": lambda: parallel_state.get_data_parallel_group(),
    "dp_cp": lambda: parallel_state.get_data_parallel_group(with_context_parallel=True),
    "dp_cp_ag": lambda: None,
    "expt_dp": lambda: parallel_state.get_expert_data_parallel_group(False),
    "expt_dp_ag": lambda: None,
    "intra_dp_cp": lambda: parallel_state.get_data_parallel_group(
        with_context_parallel=True, partial_data_parallel=True
    ),
    "intra_expt_dp": lambda: parallel_state.get_expert_data_parallel_group(False, partial_expert_data_parallel=True),
    "inter_dist_opt": lambda: parallel_state.get_inter_distributed_optimizer_instance_group(False),
    "intra_dist_opt": lambda: parallel_state.get_intra_distributed_optimizer_instance_group(False),
}
_UNUSED = ("gtp_remat", "expt_gtp_remat", "dp_cp_gtp_remat", "expt_dp_gtp_remat", "tp_ep_pp_with_egtp_remat")


class ProcessGroupCollection:
    """Process groups by Megatron's short names (``tp``, ``pp``, ``dp_cp``, ``expt_dp``, ...); None if not given.

    Reading an unknown name raises AttributeError; passing one to the constructor raises ConfigError.
    """

    def __init__(self, **groups: Any) -> None:
        for name, group in groups.items():
            if name not in _GETTERS and name not in _UNUSED:
                raise ConfigError(f"Unknown attribute: {name}; legal: {', '.join((*_GETTERS, *_UNUSED))}")
            setattr(self, name, group)

    def __getattr__(self, name: str) -> Any:
        """Return None for a group that was not given."""
        if name in _GETTERS or name in _UNUSED:
            return None
        raise AttributeError(f"ProcessGroupCollection has no group {name!r}")

    def __repr__(self) -> str:
        """Return the given groups with their sizes."""
        found = {name: group for name, group in vars(self).items() if group is not None}
        sizes = [f"{n}({[one.size() for one in g] if isinstance(g, list) else g.size()})" for n, g in found.items()]
        return f"ProcessGroupCollection({', '.join(sizes) or 'empty'})"

    @classmethod
    def use_mpu_process_groups(cls, required_pgs: list[str] | None = None) -> "ProcessGroupCollection":
        """Return the groups of the current layout, all or only ``required_pgs``."""
        wanted = list(_GETTERS) if required_pgs is None else required_pgs
        wrong = [name for name in wanted if name not in _GETTERS and name not in _UNUSED]
        if wrong:
            raise ConfigError(f"Invalid process groups requested: {wrong}; legal: {', '.join(_GETTERS)}")
        return cls(**{name: _GETTERS[name]() for name in wanted if name in _GETTERS})


def check_groups(pg_collection: Any, names: Iterable[str], user: str) -> None:
    """Raise ConfigError if a group of ``pg_collection`` has other ranks than the group of the current layout."""
    for name in names if pg_collection is not None else ():
        group, own = getattr(pg_collection, name, None), _GETTERS[name]()
        if group is not None and own is not None and _ranks(group) != _ranks(own):
            raise ConfigError(
                f"{user}: pg_collection.{name} has the ranks {_ranks(group)}, but the current layout's group has "
                f"{_ranks(own)}; pass the sizes of pg_collection to initialize_model_parallel"
            )


def _ranks(group: Any) -> list[int]:
    if isinstance(group, dist.ProcessGroup):
        return dist.get_process_group_ranks(group)
    return [dist.get_rank() if dist.is_initialized() else 0]


ModelCommProcessGroups = ProcessGroupCollection
"""The name of the class before release 0.15."""
