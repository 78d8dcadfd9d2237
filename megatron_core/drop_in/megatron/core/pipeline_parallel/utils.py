"""A rank's place in its pipeline."""

import torch.distributed as dist

from megatron.core.utils import unwrap_model
from megatron_core.parallel.groups import Group


def is_pp_first_stage(pp_group: Group) -> bool:
    """Whether this rank is the first of the group."""
    return pp_group.rank() == 0


def is_pp_last_stage(pp_group: Group) -> bool:
    """Whether this rank is the last of the group."""
    return pp_group.rank() == pp_group.size() - 1


def is_vp_first_stage(vp_stage: int | None, vp_size: int | None) -> bool:
    """Whether a chunk is the first of its rank; True without interleaving."""
    return not vp_size or vp_size == 1 or vp_stage == 0


def is_vp_last_stage(vp_stage: int | None, vp_size: int | None) -> bool:
    """Whether a chunk is the last of its rank; True without interleaving."""
    return not vp_size or vp_size == 1 or vp_stage == vp_size - 1


def _neighbour(pp_group: Group, index: int) -> int:
    """Return the global rank at an index of the group, modulo its size."""
    ranks = dist.get_process_group_ranks(pp_group) if isinstance(pp_group, dist.ProcessGroup) else [0]
    return ranks[index % len(ranks)]


def get_pp_first_rank(pp_group: Group) -> int:
    """Return the global rank of the first stage."""
    return _neighbour(pp_group, 0)


def get_pp_last_rank(pp_group: Group) -> int:
    """Return the global rank of the last stage."""
    return _neighbour(pp_group, -1)


def get_pp_next_rank(pp_group: Group) -> int:
    """Return the global rank of the next stage; the first stage follows the last."""
    return _neighbour(pp_group, pp_group.rank() + 1)


def get_pp_prev_rank(pp_group: Group) -> int:
    """Return the global rank of the previous stage; the last stage precedes the first."""
    return _neighbour(pp_group, pp_group.rank() - 1)
