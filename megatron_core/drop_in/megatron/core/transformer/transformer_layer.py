"""A transformer layer, and the number of the first one on a stage."""

from typing import Any

from torch import Tensor

from megatron.core.transformer.exported import ExportedModule, adopt, refuse
from megatron.core.transformer.layer_context import (
    SampleNumbers,
    TransformerLayerSubmodules,
    layer_context,
    layer_specs_of,
)
from megatron.core.transformer.layer_parts import PARTS
from megatron.core.transformer.loss_collector import keep_expert_biases_in_fp32
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.stages import draw_weights, stage_layers
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron_core.errors import ConfigError
from megatron_core.parallel.current import current
from megatron_core.transformer import layer
from megatron_core.transformer.context import SequenceContext


def get_transformer_layer_offset(
    config: TransformerConfig, vp_stage: int | None = None, pp_rank: int | None = None
) -> int:
    """Layers on all stages before a stage of this pipeline rank, or of ``pp_rank``."""
    return stage_layers(config, vp_stage, pp_rank).start


LAYER_PARTS = (*PARTS, MoELayer)


class TransformerLayer(ExportedModule, layer.TransformerLayer):
    """One layer with Megatron Core's arguments; ``layer_number`` counts from 1, within the stage of this rank unless
    ``add_layer_offset`` is False, and is global afterwards."""

    stands_for = layer.TransformerLayer

    layer_number: int

    def __init__(
        self,
        config: TransformerConfig,
        submodules: TransformerLayerSubmodules,
        layer_number: int = 1,
        hidden_dropout: float | None = None,
        pg_collection: Any = None,
        vp_stage: int | None = None,
        is_mtp_layer: bool = False,
        add_layer_offset: bool = True,
        pp_layer_offset: int | None = None,
        name: str | None = None,
    ) -> None:
        if is_mtp_layer:
            raise ConfigError("TransformerLayer: is_mtp_layer=True is not supported; give GPTModel mtp_num_layers")
        given = {} if hidden_dropout is None else {"hidden_dropout": hidden_dropout}
        model, samples = config.model_config(**given), SampleNumbers(current())
        context = layer_context(config, model, pg_collection)
        number = layer_number - 1
        if add_layer_offset:
            number += get_transformer_layer_offset(config, vp_stage) if pp_layer_offset is None else pp_layer_offset
        spec = layer_specs_of(config, submodules)(model, number)
        layer.TransformerLayer.__init__(self, context, number, spec)
        self.layer_number, self._loss_names = number + 1, spec.auxiliary_losses
        self.expert_layers = [number] if isinstance(self.mlp, MoELayer.stands_for) else []
        adopt(self, LAYER_PARTS, config, context, samples)
        keep_expert_biases_in_fp32(self)
        draw_weights(self, context.seed, f"decoder.layers.{number}.")

    _loss_names: tuple[str, ...] = ()

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        context: Any = None,
        context_mask: Any = None,
        rotary_pos_emb: Tensor | None = None,
        rotary_pos_cos: Any = None,
        rotary_pos_sin: Any = None,
        rotary_pos_cos_sin: Any = None,
        attention_bias: Any = None,
        inference_context: Any = None,
        packed_seq_params: Any = None,
        sequence_len_offset: Any = None,
        padding_mask: Tensor | None = None,
        *,
        inference_params: Any = None,
        dynamic_inference_decode_only: Any = None,
    ) -> Any:
        """``[s, b, h]`` -> (the same shape, None, as there is no cross attention); within a model the first alone."""
        if isinstance(attention_mask, SequenceContext):
            return super().forward(hidden_states, attention_mask)
        refuse(
            "TransformerLayer.forward",
            context=context,
            context_mask=context_mask,
            rotary_pos_cos=rotary_pos_cos,
            rotary_pos_sin=rotary_pos_sin,
            rotary_pos_cos_sin=rotary_pos_cos_sin,
            attention_bias=attention_bias,
            inference_context=inference_context if inference_params is None else inference_params,
            sequence_len_offset=sequence_len_offset,
        )
        passed = self.sequence(hidden_states, attention_mask, rotary_pos_emb, packed_seq_params, padding_mask)
        passed = self.with_losses(
            self.context, self._loss_names, hidden_states, passed, per_token=self.config.calculate_per_token_loss
        )
        return super().forward(hidden_states, passed), None
