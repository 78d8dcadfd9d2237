"""The distributions of initial weights."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor, nn

from megatron_core.config import ModelConfig


@dataclass(frozen=True)
class Initial:
    """Normal distributions for inner matrices and for those that write the residual stream, and the run's seed.

    Output matrices have std / sqrt(2 L), so that the residual stream's variance does not grow with depth
    (Radford et al. 2019, section 2.3).
    """

    std: float
    num_layers: int
    seed: int

    @classmethod
    def of(cls, config: ModelConfig, seed: int) -> Initial:
        """The distributions that ``config`` asks for."""
        return cls(config.init_method_std, config.num_layers, seed)

    def inner(self, weight: Tensor) -> Tensor:
        """N(0, std)."""
        return nn.init.normal_(weight, std=self.std)

    def output(self, weight: Tensor) -> Tensor:
        """N(0, std / sqrt(2 L))."""
        return nn.init.normal_(weight, std=self.std / math.sqrt(2.0 * self.num_layers))
