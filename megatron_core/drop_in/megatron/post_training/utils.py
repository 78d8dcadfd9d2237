"""Rejects the use of ModelOpt."""

from argparse import Namespace

from megatron_core.errors import ConfigError


def maybe_enable_modelopt(args: Namespace) -> None:
    """Raise ConfigError if ``args.modelopt_enabled`` is set."""
    if getattr(args, "modelopt_enabled", False):
        raise ConfigError("modelopt_enabled=True needs ModelOpt, which is not supported; train without it")
