"""A layer of experts with Megatron Core's arguments, and the parts of its specification."""

from typing import Any

from torch import Tensor

from megatron.core.transformer.exported import ExportedModule, adopt, refuse
from megatron.core.transformer.layer_context import MoESubmodules, SampleNumbers, layer_context
from megatron.core.transformer.layer_parts import PARTS
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron_core.transformer.context import LayerContext, SequenceContext
from megatron_core.transformer.moe import layer

MOE_PARTS = (TEGroupedMLP, SharedExpertMLP)
"""The classes of the parts of a layer of experts."""


class MoELayer(ExportedModule, layer.MoELayer):
    """A layer of experts alone; ``layer_number`` counts from 1 and is a part of the weights' names.

    Balancing losses take part in the backward pass, as means over each micro-batch; ``finalize_model_grads`` updates
    the expert biases.
    """

    stands_for = layer.MoELayer

    layer_number: int

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MoESubmodules | None = None,
        layer_number: int | None = None,
        pg_collection: Any = None,
        is_mtp_layer: bool = False,
        name: str | None = None,
    ) -> None:
        context, number = layer_context(config, config.model_config(), pg_collection), (layer_number or 1) - 1
        layer.MoELayer.__init__(self, context, number)
        adopt(self, (*PARTS, *MOE_PARTS), config, context, f"decoder.layers.{number}.mlp.")

    def bind(self, config: TransformerConfig, context: LayerContext, samples: SampleNumbers) -> None:
        """Bind the layer and number it from 1."""
        super().bind(config, context, samples)
        self.expert_layers, self.layer_number = [self.router.layer_number], self.router.layer_number + 1

    def forward(
        self,
        hidden_states: Tensor,
        intermediate_tensors: Any = None,
        padding_mask: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        """``[s, b, h]`` -> (the same shape, None: there is no bias to add). ``padding_mask`` ``[b, s]`` is True for
        padding, which does not count in losses and loads."""
        if isinstance(intermediate_tensors, SequenceContext):
            return super().forward(hidden_states, intermediate_tensors)
        refuse("MoELayer.forward", locals())
        passed = self.sequence(hidden_states, padding_mask=padding_mask)
        passed = self.with_losses(layer.moe_loss_names(self.context.config), hidden_states, passed)
        return super().forward(hidden_states, passed)


BaseMoELayer = MoELayer
