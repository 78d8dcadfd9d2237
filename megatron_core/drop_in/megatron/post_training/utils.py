"""Names of ModelOpt, which is not supported."""

from argparse import ArgumentParser, Namespace
from dataclasses import dataclass

from megatron.training.models.gpt import GPTModelConfig
from megatron_core.drop_in.unsupported import unsupported
from megatron_core.errors import ConfigError


def maybe_enable_modelopt(args: Namespace) -> None:
    """Raise ConfigError if ``args.modelopt_enabled`` is set."""
    if getattr(args, "modelopt_enabled", False):
        raise ConfigError("modelopt_enabled=True needs ModelOpt, which is not supported; train without it")


_refuse = unsupported("a ModelOptModelConfig needs ModelOpt, which is not supported; train without it")


@dataclass(kw_only=True)
class ModelOptModelConfig(GPTModelConfig):
    """Settings of a model of ModelOpt; building an instance raises ConfigError."""

    def __post_init__(self) -> None:
        _refuse()


modelopt_gpt_hybrid_builder = modelopt_gpt_mamba_builder = _refuse
ModelOptHybridModelConfig = ModelOptModelConfig
"""The configuration of hybrid models of ModelOpt."""


def add_modelopt_args(parser: ArgumentParser) -> ArgumentParser:
    """Return ``parser`` unchanged: the command line reports unsupported flags of ModelOpt."""
    return parser
