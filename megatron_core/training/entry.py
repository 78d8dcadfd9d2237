"""For Megatron-LM's users: one ``pretrain`` for this package's arguments and for Megatron-LM's."""

from typing import Any

from megatron_core.config import RunConfig
from megatron_core.training import pretrain as own


def pretrain(*given: Any, **named: Any) -> None:
    """``training.pretrain.pretrain`` of a ``RunConfig`` and a ``World``; otherwise ``training.program.pretrain``."""
    if isinstance(next(iter(given), named.get("config")), RunConfig):
        own.pretrain(*given, **named)
    else:
        from megatron_core.training import program

        program.pretrain(*given, **named)
