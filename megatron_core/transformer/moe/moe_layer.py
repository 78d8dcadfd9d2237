"""For Megatron Core's users: a layer of experts with Megatron Core's arguments, and the parts of its specification."""

from typing import Any

from torch import Tensor

from megatron_core.parallel.current import current
from megatron_core.transformer.layer_context import (
    MoESubmodules as MoESubmodules,
)
from megatron_core.transformer.layer_context import (
    SampleNumbers,
    layer_context,
    sequence_context,
)
from megatron_core.transformer.moe import layer
from megatron_core.transformer.stages import draw_weights
from megatron_core.transformer.transformer_config import TransformerConfig


class MoELayer(layer.MoELayer):
    """A layer of experts alone; ``layer_number`` counts from 1 and is a part of the weights' names.

    Losses that balance the load need a ``GPTModel``, which collects them: without one they are an error in training.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MoESubmodules | None = None,
        layer_number: int | None = None,
        pg_collection: Any = None,
        is_mtp_layer: bool = False,
    ) -> None:
        context, number = layer_context(config, config.model_config(), pg_collection), (layer_number or 1) - 1
        super().__init__(context, number)
        self._context, self._samples = context, SampleNumbers(current())
        draw_weights(self, context.seed, f"decoder.layers.{number}.mlp.")

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """``[s, b, h]`` -> (the same shape, None: there is no bias to add)."""
        samples = self._samples.take(hidden_states.shape[1], hidden_states.device) if self.training else None
        return super().forward(hidden_states, sequence_context(self._context, hidden_states, None, None, samples))
