"""For Megatron Core's users: where a rank stands in its pipeline."""

from megatron_core.parallel.groups import Group


def is_pp_first_stage(pp_group: Group) -> bool:
    """Whether this rank is the first of the group."""
    return pp_group.rank() == 0


def is_pp_last_stage(pp_group: Group) -> bool:
    """Whether this rank is the last of the group."""
    return pp_group.rank() == pp_group.size() - 1


def is_vp_first_stage(vp_stage: int | None, vp_size: int | None) -> bool:
    """Whether a chunk is a rank's first; always without several."""
    return not vp_size or vp_size == 1 or vp_stage == 0


def is_vp_last_stage(vp_stage: int | None, vp_size: int | None) -> bool:
    """Whether a chunk is a rank's last; always without several."""
    return not vp_size or vp_size == 1 or vp_stage == vp_size - 1
