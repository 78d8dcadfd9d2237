"""A transformer layer, and the number of the first layer on a stage."""

from typing import Any

from torch import Tensor

from megatron.core.transformer.exported import ExportedModule, adopt, refuse
from megatron.core.transformer.layer_context import (
    TransformerLayerSubmodules,
    layer_context,
    layer_specs_of,
    stage_layers,
)
from megatron.core.transformer.layer_parts import PARTS
from megatron.core.transformer.moe.moe_layer import MOE_PARTS, MoELayer
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron_core.errors import ConfigError, LayoutError
from megatron_core.transformer import block
from megatron_core.transformer.context import SequenceContext

LAYER_PARTS = (*PARTS, *MOE_PARTS, MLASelfAttention, MoELayer)
"""The classes of the parts of a layer."""


def get_transformer_layer_offset(
    config: TransformerConfig, vp_stage: int | None = None, pp_rank: int | None = None
) -> int:
    """Return the number of layers on all stages before a stage of this pipeline rank, or of ``pp_rank``."""
    return stage_layers(config, vp_stage, pp_rank).start


class BaseTransformerLayer:
    """Base of the classes that a layer's specification can name."""


class LayerCall(ExportedModule):
    """``forward`` with Megatron Core's arguments, of one layer or of a block."""

    input_tensor: Tensor | None = None
    _loss_names: tuple[str, ...] = ()

    def forward(
        self,
        hidden_states: Tensor | None,
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
        extract_layer_indices: Any = None,
        *,
        inference_params: Any = None,
        dynamic_inference_decode_only: Any = None,
    ) -> Any:
        """``[s, b, h]`` -> the same shape; a ``TransformerLayer`` returns a pair with None, the cross attention.

        ``padding_mask`` ``[b, s]`` is True for padding, which does not count in the losses of experts. A block that is
        not on the first stage reads the tensor of ``set_input_tensor``. With ``extract_layer_indices``, numbers from 0,
        a block returns (output, outputs of these layers of the stage, in order).
        """
        inner: Any = super()
        if isinstance(attention_mask, SequenceContext):
            return inner.forward(hidden_states, attention_mask)
        refuse(f"{type(self).__name__}.forward", locals())
        if not getattr(self, "pre_process", True):
            hidden_states, self.input_tensor = self.input_tensor, None
        if hidden_states is None:
            raise LayoutError("there is no input: pass hidden_states, or call set_input_tensor before")
        passed = self.sequence(hidden_states, attention_mask, rotary_pos_emb, packed_seq_params, padding_mask)
        passed = self.with_losses(self._loss_names, hidden_states, passed)
        return self._returned(hidden_states, passed, extract_layer_indices)

    def _returned(self, hidden: Tensor, passed: SequenceContext, indices: Any) -> Any:
        """Run the engine's ``forward`` and return Megatron's result."""
        raise NotImplementedError


class TransformerLayer(LayerCall, block.TransformerLayer, BaseTransformerLayer):  # type: ignore[misc]  # both arguments of ``forward``
    """One layer with Megatron Core's arguments.

    The argument ``layer_number`` counts from 1, within the stage of this rank unless ``add_layer_offset`` is False; the
    attribute is the global number.
    """

    stands_for = block.TransformerLayer

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
        changed: dict[str, Any] = {} if hidden_dropout is None else {"hidden_dropout": hidden_dropout}
        model = config.model_config(**changed)
        context = layer_context(config, model, pg_collection)
        number = layer_number - 1
        if add_layer_offset:
            number += get_transformer_layer_offset(config, vp_stage) if pp_layer_offset is None else pp_layer_offset
        spec = layer_specs_of(config, submodules)(model, number)
        block.TransformerLayer.__init__(self, context, number, spec)
        self.layer_number, self._loss_names = number + 1, spec.auxiliary_losses
        self.expert_layers = [number] if isinstance(self.mlp, MoELayer.stands_for) else []
        adopt(self, LAYER_PARTS, config, context, f"decoder.layers.{number}.")

    def _returned(self, hidden: Tensor, passed: SequenceContext, indices: Any) -> tuple[Tensor, None]:
        if indices is not None:
            raise ConfigError("TransformerLayer.forward: extract_layer_indices is not supported; use TransformerBlock")
        return block.TransformerLayer.forward(self, hidden, passed), None
