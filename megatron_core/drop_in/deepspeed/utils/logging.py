"""The logger ``DeepSpeed`` and messages by rank."""

import logging
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch.distributed as dist

log_levels = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}


@cache
def _make_logger() -> logging.Logger:
    found = logging.getLogger("DeepSpeed")
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("[%(asctime)s] [%(levelname)s] %(message)s"))
    found.addHandler(handler)
    found.setLevel(logging.INFO)
    found.propagate = False
    return found


logger = _make_logger()


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log ``message`` on the given ranks; -1 or None: on all."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    if ranks is None or not len(ranks) or -1 in ranks or rank in ranks:
        logger.log(level, f"[Rank {rank}] {message}")


@cache
def warning_once(message: str) -> None:
    """Log a warning the first time."""
    logger.warning(message)


def print_dist(message: str, ranks: Sequence[int] | None = None) -> None:
    """Print ``message`` on the given ranks."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    if ranks is None or -1 in ranks or rank in ranks:
        print(f"[Rank {rank}] {message}", flush=True)


def set_log_level_from_string(log_level_str: str, custom_logger: Any = None) -> None:
    """Set the level of the logger by name, such as ``info``."""
    if log_level_str.lower() not in log_levels:
        raise ValueError(f"log level {log_level_str!r} must be one of {', '.join(log_levels)}")
    (custom_logger or logger).setLevel(log_levels[log_level_str.lower()])
