"""Whether a run uses ModelOpt."""

from argparse import Namespace
from typing import NoReturn

from megatron_core.errors import ConfigError


def refuse_modelopt(user: str) -> NoReturn:
    """Raise ConfigError for ``user``, a name of Megatron-LM's that needs ModelOpt."""
    raise ConfigError(f"{user} needs ModelOpt, which is not supported; train without it")


def maybe_enable_modelopt(args: Namespace) -> None:
    """Do nothing unless ``args.modelopt_enabled`` is set, which raises ConfigError."""
    if getattr(args, "modelopt_enabled", False):
        refuse_modelopt("modelopt_enabled=True")
