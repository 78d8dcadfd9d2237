"""For Megatron Core's users: a transformer layer, and the number of the first one on a stage."""

from typing import Any

from torch import Tensor

from megatron_core.parallel.current import current
from megatron_core.transformer import layer
from megatron_core.transformer.layer_context import (
    SampleNumbers,
    layer_context,
    layer_specs_of,
    sequence_context,
)
from megatron_core.transformer.layer_context import (
    TransformerLayerSubmodules as TransformerLayerSubmodules,
)
from megatron_core.transformer.stages import draw_weights, stage_layers
from megatron_core.transformer.transformer_config import TransformerConfig


def get_transformer_layer_offset(
    config: TransformerConfig, vp_stage: int | None = None, pp_rank: int | None = None
) -> int:
    """Layers on all stages before a stage of this pipeline rank, or of ``pp_rank``."""
    return stage_layers(config, vp_stage, pp_rank).start


class TransformerLayer(layer.TransformerLayer):
    """One layer with Megatron Core's arguments; ``layer_number`` counts from 1, within the stage of this rank unless
    ``add_layer_offset`` is False."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: TransformerLayerSubmodules,
        layer_number: int = 1,
        hidden_dropout: float | None = None,
        pg_collection: Any = None,
        vp_stage: int | None = None,
        add_layer_offset: bool = True,
    ) -> None:
        given = {} if hidden_dropout is None else {"hidden_dropout": hidden_dropout}
        model = config.model_config(**given)
        self_context = layer_context(config, model, pg_collection)
        number = layer_number - 1
        if add_layer_offset:
            number += get_transformer_layer_offset(config, vp_stage)
        super().__init__(self_context, number, layer_specs_of(config, submodules)(model, number))
        self.config, self.layer_number = config, number + 1
        self._context, self._samples = self_context, SampleNumbers(current())
        draw_weights(self, self_context.seed, f"decoder.layers.{number}.")

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        context: Any = None,
        context_mask: Any = None,
        rotary_pos_emb: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        """``[s, b, h]`` -> (the same shape, None, as there is no cross attention)."""
        samples = self._samples.take(hidden_states.shape[1], hidden_states.device) if self.training else None
        passed = sequence_context(self._context, hidden_states, attention_mask, rotary_pos_emb, samples)
        return super().forward(hidden_states, passed), None
