"""Rejects the use of ModelOpt."""

from argparse import Namespace
from typing import NoReturn

from megatron_core.errors import ConfigError


def refuse_modelopt(user: str) -> NoReturn:
    """Raise ConfigError for ``user``, a name of Megatron-LM that needs ModelOpt."""
    raise ConfigError(f"{user} needs ModelOpt, which is not supported; train without it")


def maybe_enable_modelopt(args: Namespace) -> None:
    """Raise ConfigError if ``args.modelopt_enabled`` is set."""
    if getattr(args, "modelopt_enabled", False):
        refuse_modelopt("modelopt_enabled=True")
