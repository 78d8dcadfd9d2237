"""Rank and size of a job from Slurm's environment variables."""

import os


def is_slurm_job() -> bool:
    """Whether Slurm started this process."""
    return "SLURM_NTASKS" in os.environ


def _read(name: str) -> int | None:
    return int(os.environ[name]) if is_slurm_job() and name in os.environ else None


def resolve_slurm_rank() -> int | None:
    """Return the global rank; None outside of Slurm."""
    return _read("SLURM_PROCID")


def resolve_slurm_world_size() -> int | None:
    """Return the number of ranks; None outside of Slurm."""
    return _read("SLURM_NTASKS")


def resolve_slurm_local_rank() -> int | None:
    """Return the rank on this machine; None outside of Slurm."""
    return _read("SLURM_LOCALID")
