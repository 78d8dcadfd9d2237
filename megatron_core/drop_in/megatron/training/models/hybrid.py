"""Hybrid models of attention and state-space layers, which are not supported."""

from typing import Any, ClassVar

from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.unsupported import unsupported
from megatron.training.models.base import ModelConfig

_refuse = unsupported(HybridModel.message)


class HybridModelConfig(ModelConfig):
    """Settings of a hybrid model; building an instance raises ConfigError."""

    builder: ClassVar[str] = "megatron.training.models.hybrid.HybridModelBuilder"

    def __init__(self, **settings: Any) -> None:
        _refuse()


class HybridModelBuilder:
    """Builder of hybrid models; building an instance raises ConfigError."""

    def __init__(self, model_config: Any = None) -> None:
        _refuse()
