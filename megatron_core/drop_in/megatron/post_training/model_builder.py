"""Models of ModelOpt."""

from dataclasses import dataclass
from typing import Any, NoReturn

from megatron.post_training.utils import refuse_modelopt
from megatron.training.models.gpt import GPTModelConfig


@dataclass(kw_only=True)
class ModelOptModelConfig(GPTModelConfig):
    """Settings of a model of ModelOpt; building it raises ConfigError."""

    def __post_init__(self) -> None:
        refuse_modelopt("ModelOptModelConfig")


def modelopt_gpt_hybrid_builder(*args: Any, **kwargs: Any) -> NoReturn:
    """Raise ConfigError: ModelOpt is not supported."""
    refuse_modelopt("modelopt_gpt_hybrid_builder")


modelopt_gpt_mamba_builder = modelopt_gpt_hybrid_builder
