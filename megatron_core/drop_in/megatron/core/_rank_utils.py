"""Rank and size of a job, of Slurm's environment variables or of others before torch.distributed is started."""

import logging
import os
import warnings
from typing import Any

import torch.distributed as dist

from megatron_core.launcher import read_integer


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


def safe_get_rank() -> int:
    """Return the rank: of torch.distributed, else RANK, else SLURM_PROCID, else 0 with a warning."""
    if dist.is_initialized():
        return dist.get_rank()
    return of_environment("RANK", resolve_slurm_rank(), 0, "rank")


def safe_get_world_size() -> int:
    """Return the number of ranks: of torch.distributed, else WORLD_SIZE, else SLURM_NTASKS, else 1 with a warning.

    Raises ValueError if the variable is not an integer.
    """
    if dist.is_initialized():
        return dist.get_world_size()
    return of_environment("WORLD_SIZE", resolve_slurm_world_size(), 1, "world size")


def of_environment(variable: str, of_slurm: int | None, default: int, meaning: str) -> int:
    """Return an environment variable, else Slurm's value, else ``default`` with a warning."""
    if variable in os.environ:
        return read_integer(variable, default)
    if of_slurm is None:
        warnings.warn(f"Could not determine {meaning}: {variable} is not set; it is {default}", stacklevel=3)
        return default
    return of_slurm


def log_single_rank(logger: logging.Logger, level: int, msg: object, *args: Any, rank: int = 0, **kwargs: Any) -> None:
    """Call ``logger.log(...)`` on one rank."""
    if logger.isEnabledFor(level) and safe_get_rank() == rank:
        logger.log(level, msg, *args, **kwargs)
