"""Models of ModelOpt, which are not supported."""

from dataclasses import dataclass

from megatron.training.models.gpt import GPTModelConfig
from megatron_core.drop_in.unsupported import unsupported

_refuse = unsupported("a ModelOptModelConfig needs ModelOpt, which is not supported; train without it")


@dataclass(kw_only=True)
class ModelOptModelConfig(GPTModelConfig):
    """Settings of a model of ModelOpt; building an instance raises ConfigError."""

    def __post_init__(self) -> None:
        _refuse()


modelopt_gpt_hybrid_builder = modelopt_gpt_mamba_builder = _refuse
ModelOptHybridModelConfig = ModelOptModelConfig
"""The configuration of hybrid models of ModelOpt."""
