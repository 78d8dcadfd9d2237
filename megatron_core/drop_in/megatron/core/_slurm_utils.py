"""``megatron.core.slurm`` at Megatron's path."""

from megatron.core.slurm import (
    is_slurm_job,
    resolve_slurm_local_rank,
    resolve_slurm_rank,
    resolve_slurm_world_size,
)
