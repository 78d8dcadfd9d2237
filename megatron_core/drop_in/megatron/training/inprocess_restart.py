"""Restarts within a process, in whose place ``--max-restarts`` of torchrun is."""

from collections.abc import Callable
from typing import Any


def maybe_wrap_for_inprocess_restart(pretrain: Callable[..., Any]) -> tuple[Callable[..., Any], None]:
    """Return ``pretrain`` unchanged and no store; the command line reports what ``--inprocess-restart`` does here."""
    return pretrain, None
