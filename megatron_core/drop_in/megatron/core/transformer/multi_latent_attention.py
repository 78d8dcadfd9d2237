"""Multi-head latent attention with Megatron Core's arguments."""

from dataclasses import replace
from typing import Any

from torch import Tensor

from megatron.core.enums import AttnMaskType
from megatron.core.transformer.exported import ExportedModule, adopt, refuse
from megatron.core.transformer.layer_context import MLASelfAttentionSubmodules, check_submodules, layer_context
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron_core.config.attention import attention_of
from megatron_core.errors import ConfigError
from megatron_core.features.latent_attention.attention import LatentAttention
from megatron_core.features.latent_attention.settings import LatentAttentionConfig
from megatron_core.ops.rows import wide
from megatron_core.transformer.context import SequenceContext
from megatron_core.transformer.layer_spec import layer_spec
from megatron_core.transformer.rotary import rotary_frequencies, rotary_table


class MLASelfAttention(ExportedModule, LatentAttention):
    """Latent attention alone, which rotates by the positions itself. Weights are named by ``layer_number``, from 1.

    It is causal: pass a mask for another order.
    """

    stands_for = LatentAttention

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MLASelfAttentionSubmodules | None = None,
        layer_number: int = 1,
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        pp_layer_offset: int | None = None,
        name: str | None = None,
    ) -> None:
        model, number = config.model_config(), layer_number - 1
        if not model.section(LatentAttentionConfig).multi_latent_attention:
            raise ConfigError("MLASelfAttention: multi_latent_attention=False; pass an MLATransformerConfig")
        check_submodules(model, submodules)
        context = layer_context(config, model, pg_collection)
        given: Any = layer_spec(model, number).self_attention
        LatentAttention.__init__(self, context, number, **given.keywords)
        adopt(self, (), config, context, f"decoder.layers.{number}.self_attention.")

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        key_value_states: Any = None,
        inference_context: Any = None,
        rotary_pos_emb: Any = None,
        rotary_pos_cos: Any = None,
        rotary_pos_sin: Any = None,
        rotary_pos_cos_sin: Any = None,
        attention_bias: Any = None,
        packed_seq_params: Any = None,
        position_ids: Any = None,
        sequence_len_offset: Any = None,
        *,
        inference_params: Any = None,
    ) -> tuple[Tensor, Tensor | None]:
        """``[s, b, h]`` -> (the same shape, the bias to add or None). ``position_ids`` ``[b, s]`` are by default those
        in whole sequences, ``rotary_pos_emb`` has no effect."""
        if isinstance(attention_mask, SequenceContext):
            return super().forward(hidden_states, attention_mask)
        refuse("MLASelfAttention.forward", locals())
        passed = self.sequence(hidden_states, attention_mask, None, packed_seq_params)
        assert passed.positions is not None, "sequence makes them"
        model, positions = self.context.config, passed.positions[None] if position_ids is None else position_ids
        channels = attention_of(model).rotary_channels
        frequencies, magnitude = rotary_frequencies(model, channels, len(passed.positions), hidden_states.device)
        table = rotary_table(positions, frequencies, wide(hidden_states.dtype), magnitude=magnitude)
        return super().forward(hidden_states, replace(passed, rotary=table))


MultiLatentAttention = MLASelfAttention
