"""Megatron-LM's experimental files of settings; use ``--config`` instead."""

from argparse import Namespace
from typing import NoReturn

from megatron_core.errors import ConfigError


def core_transformer_config_from_yaml(args: Namespace, transfomer_key: str = "language_model") -> NoReturn:
    """Raise ConfigError."""
    raise ConfigError(f"yaml_cfg={args.yaml_cfg!r} is not supported; write the settings as --config FILE")
