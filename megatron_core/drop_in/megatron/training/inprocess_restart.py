"""Restarts within a process; use ``--max-restarts`` of torchrun instead."""

from collections.abc import Callable
from typing import Any


def maybe_wrap_for_inprocess_restart(pretrain: Callable[..., Any]) -> tuple[Callable[..., Any], None]:
    """Return ``pretrain`` unchanged and no store; the command line reports ``--inprocess-restart``."""
    return pretrain, None
