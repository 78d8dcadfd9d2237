"""Levels and filters of loggers, and the file of a run's progress."""

import logging
import os
from collections.abc import Callable
from datetime import datetime
from functools import partial
from logging import Filter, LogRecord
from pathlib import Path

import torch

from megatron.core._rank_utils import safe_get_rank, safe_get_world_size
from megatron.training.utils.common_utils import print_rank_0


def warning_filter(record: LogRecord) -> bool:
    """Whether a record is not a warning."""
    return record.levelno != logging.WARNING


def module_filter(record: LogRecord, modules_to_filter: list[str]) -> bool:
    """Whether the name of a record's logger begins with none of the names."""
    return not record.name.startswith(tuple(modules_to_filter))


def add_filter_to_all_loggers(filter: Filter | Callable[[LogRecord], bool]) -> None:
    """Add a filter to the root logger and to all loggers that exist."""
    for name in (None, *logging.root.manager.loggerDict):
        logging.getLogger(name).addFilter(filter)


def setup_logging(
    logging_level: int | None = None,
    filter_warning: bool = True,
    modules_to_filter: list[str] | None = None,
    set_level_for_all_loggers: bool = False,
) -> None:
    """Set the level of the root logger and of ``megatron.bridge``, or of all loggers, and add the filters.

    The level is ``logging_level``, else MEGATRON_LOGGING_LEVEL, else INFO.
    """
    given = os.environ.get("MEGATRON_LOGGING_LEVEL")
    level = logging_level if logging_level is not None else logging.INFO if given is None else int(given)
    logging.getLogger().setLevel(level)
    for name in logging.root.manager.loggerDict:
        if set_level_for_all_loggers or name.startswith("megatron.bridge"):
            logging.getLogger(name).setLevel(level)
    if filter_warning:
        add_filter_to_all_loggers(warning_filter)
    if modules_to_filter:
        add_filter_to_all_loggers(partial(module_filter, modules_to_filter=modules_to_filter))


def append_to_progress_log(save_dir: str | None, string: str, barrier: bool = True) -> None:
    """Append a line with the time, the Slurm job and the number of ranks to ``save_dir``/progress.txt on rank 0."""
    if save_dir is None:
        return
    if barrier and torch.distributed.is_initialized():
        torch.distributed.barrier()
    if safe_get_rank() == 0:
        Path(save_dir).mkdir(parents=True, exist_ok=True)
        job, ranks = os.environ.get("SLURM_JOB_ID", ""), safe_get_world_size()
        with Path(save_dir, "progress.txt").open("a") as file:
            file.write(f"{_now()}\tJob ID: {job}\t# GPUs: {ranks}\t{string}\n")


def barrier_and_log(string: str) -> None:
    """Wait for all ranks, then print a message with the time on rank 0."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    print_rank_0(f"[{string}] datetime: {_now()} ")


def _now() -> str:
    return f"{datetime.now():%Y-%m-%d %H:%M:%S}"
