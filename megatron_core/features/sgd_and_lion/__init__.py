"""Optimizers with one moment: SGD, and Lion (Chen et al. 2023)."""

from megatron_core.feature import Feature
from megatron_core.features.sgd_and_lion.settings import LION, SGD, MomentumConfig

SGD_AND_LION = Feature(
    name="sgd_and_lion",
    settings=MomentumConfig,
    is_used=lambda config: bool({SGD, LION} & set(config.optimizer.kinds)),
    optimizers=(SGD, LION),
    in_any_model=True,
)
