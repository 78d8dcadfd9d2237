"""What all layers of a model are built from."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor, nn

from megatron_core.config import ModelConfig
from megatron_core.parallel.groups import Group
from megatron_core.tensor_parallel import KeyedDropout, ModelParallelConfig


@dataclass(frozen=True)
class Blueprint:
    """The model's shape, how its layers are split and communicate, and the seed of weights and dropout."""

    config: ModelConfig
    parallel: ModelParallelConfig
    tp_group: Group
    seed: int

    @property
    def sequence_parallel(self) -> bool:
        """Whether each tensor-parallel rank has a part of the sequence outside the matrix products."""
        return self.parallel.sequence_parallel

    def draw_inner(self, weight: Tensor) -> Tensor:
        """N(0, std): matrices inside a layer, and embeddings."""
        return nn.init.normal_(weight, std=self.config.init_method_std)

    def draw_output(self, weight: Tensor) -> Tensor:
        """N(0, std / sqrt(2 L)): matrices that write the residual stream, so that its variance does not grow with depth
        (Radford et al. 2019, section 2.3)."""
        return nn.init.normal_(weight, std=self.config.init_method_std / math.sqrt(2.0 * self.config.num_layers))

    def dropout(self, p: float, place: str) -> KeyedDropout:
        """The dropout at a named place of the model."""
        return KeyedDropout(p, self.seed, place, self.config.kernel_backend)
