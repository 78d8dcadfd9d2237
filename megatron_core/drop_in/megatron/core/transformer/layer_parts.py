"""Attention, MLP and router of a layer with Megatron Core's arguments."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron.core.enums import AttnMaskType
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.exported import ExportedModule, adopt, refuse
from megatron.core.transformer.foreign import with_core_attention
from megatron.core.transformer.layer_context import (
    MLPSubmodules,
    SampleNumbers,
    SelfAttentionSubmodules,
    check_submodules,
    is_ours,
    layer_context,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron_core.errors import ConfigError
from megatron_core.features.experts import router
from megatron_core.features.experts.layer import moe_loss_names
from megatron_core.features.latent_attention.settings import LatentAttentionConfig
from megatron_core.transformer import attention, mlp
from megatron_core.transformer.context import LayerContext, SequenceContext
from megatron_core.transformer.layer_spec import layer_spec


class SelfAttention(ExportedModule, attention.SelfAttention):
    """Attention alone. Weights are named by ``layer_number``, which counts from 1 as an argument and from 0 as an
    attribute."""

    stands_for = attention.SelfAttention

    attn_mask_type = AttnMaskType.causal

    def __init__(
        self,
        config: TransformerConfig,
        submodules: SelfAttentionSubmodules | None = None,
        layer_number: int = 1,
        attn_mask_type: AttnMaskType = AttnMaskType.padding,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        pp_layer_offset: int | None = None,
        name: str | None = None,
    ) -> None:
        model, number = config.model_config(), layer_number - 1
        if model.section(LatentAttentionConfig).multi_latent_attention:
            raise ConfigError("SelfAttention: multi_latent_attention=True is not supported; build a TransformerLayer")
        check_submodules(model, submodules)
        context = layer_context(config, model, pg_collection)
        given: Any = layer_spec(model, number).self_attention
        core = None if submodules is None else submodules.core_attention
        if core is not None and not is_ours(core):
            given = with_core_attention(config, given, core)
        attention.SelfAttention.__init__(self, context, number, **given.keywords)
        self.attn_mask_type = attn_mask_type
        adopt(self, PARTS, config, context, f"decoder.layers.{number}.self_attention.")

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
        sequence_len_offset: Any = None,
        *,
        inference_params: Any = None,
    ) -> tuple[Tensor, Tensor | None]:
        """``[s, b, h]`` -> (the same shape, the bias to add or None). Without a mask every query sees all keys, unless
        ``attn_mask_type`` is causal."""
        if isinstance(attention_mask, SequenceContext):
            return super().forward(hidden_states, attention_mask)
        refuse("SelfAttention.forward", locals())
        if attention_mask is None and packed_seq_params is None and not is_causal(self.attn_mask_type):
            split = self.context.split
            if split.cp_size > 1:
                raise ConfigError(f"SelfAttention: attn_mask_type={self.attn_mask_type} needs context_parallel_size=1")
            length = hidden_states.shape[0] * (split.tp_size if split.sequence_parallel else 1)
            attention_mask = torch.zeros(1, 1, length, length, dtype=torch.bool, device=hidden_states.device)
        passed = self.sequence(hidden_states, attention_mask, rotary_pos_emb, packed_seq_params)
        return super().forward(hidden_states, passed)


def is_causal(kind: AttnMaskType) -> bool:
    """Whether a query does not see later keys."""
    return kind in (AttnMaskType.causal, AttnMaskType.padding_causal, AttnMaskType.causal_bottom_right)


class MLP(ExportedModule, mlp.MLP):
    """The feed-forward layer alone. Its weights depend on ``name``, or on a number from torch's CPU generator, which
    ``model_parallel_cuda_manual_seed`` seeds equally on all ranks."""

    stands_for = mlp.MLP

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MLPSubmodules | None = None,
        is_expert: bool = False,
        input_size: int | None = None,
        ffn_hidden_size: int | None = None,
        tp_group: Any = None,
        name: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        if is_expert or input_size not in (None, config.hidden_size):
            raise ConfigError(
                f"MLP: is_expert={is_expert}, input_size={input_size} is not supported; build a MoELayer for "
                f"experts, and use hidden_size={config.hidden_size} as the size of the input"
            )
        model = config.model_config()
        check_submodules(model, submodules)
        context = layer_context(config, model, pg_collection, tp_group)
        if ffn_hidden_size is not None:
            context = replace(context, config=replace(model, ffn_hidden_size=ffn_hidden_size))
        mlp.MLP.__init__(self, context, 0)
        adopt(self, PARTS, config, context, f"{name or f'mlp.{int(torch.randint(2**62, ()))}'}.")

    def forward(self, hidden_states: Tensor, per_token_scale: Any = None) -> tuple[Tensor, Tensor | None]:
        """``[s, b, h]`` -> (the same shape, the bias to add or None)."""
        if not isinstance(per_token_scale, SequenceContext):
            refuse("MLP.forward", locals())
            per_token_scale = SequenceContext()
        return super().forward(hidden_states, per_token_scale)


class RouterConfig:
    """The engine's settings of a router, and the other fields of the ``TransformerConfig`` that it was built from.

    Assignments change that configuration, see ``ChangingConfig``.
    """

    def __init__(self, own: Any, given: TransformerConfig) -> None:
        vars(self).update(_own=own, _given=given)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = vars(self)
        return getattr(found["_own"], name) if hasattr(found["_own"], name) else getattr(found["_given"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._given, name, value)


class TopKRouter(ExportedModule, router.TopKRouter):
    """The router alone. The attribute ``layer_number`` counts from 0, the argument of ``set_layer_number`` from 1."""

    stands_for = router.TopKRouter

    def __init__(
        self, config: TransformerConfig, pg_collection: Any = None, is_mtp_layer: bool = False, name: str | None = None
    ) -> None:
        context = layer_context(config, config.model_config(), pg_collection)
        router.TopKRouter.__init__(self, context, 0)
        adopt(self, PARTS, config, context, f"{name or f'router.{int(torch.randint(2**62, ()))}'}.")

    def bind(self, config: TransformerConfig, context: LayerContext, samples: SampleNumbers) -> None:
        """Bind the router; its ``config`` also has Megatron's fields."""
        self._context, self._samples, self.expert_layers = context, samples, [self.layer_number]
        self.config = RouterConfig(self.config, config)

    def set_layer_number(self, layer_number: int) -> None:
        """Set the number of the layer, from 1."""
        self.layer_number, self.expert_layers = layer_number - 1, [layer_number - 1]

    def forward(self, input: Tensor, padding_mask: Any = None, context: SequenceContext | None = None) -> Any:
        """``[s, b, h]`` or ``[n, h]`` -> (probabilities ``[s b, E]``, 0 for experts not chosen; the choice as bool).

        ``padding_mask`` ``[s, b]`` is True for padding. Balancing losses take part in the backward pass.
        """
        if isinstance(padding_mask, router.Tokens):
            assert context is not None, "the layer passes both"
            return super().forward(input, padding_mask, context)
        if input.dim() == 2:  # tokens without a batch
            input, padding_mask = input[:, None], None if padding_mask is None else padding_mask[:, None]
        mask = None if padding_mask is None else padding_mask.transpose(0, 1)
        passed = self.sequence(input, padding_mask=mask)
        names = moe_loss_names(self.config)
        passed = self.with_losses(names, input, passed, per_token=False)
        counted = input.new_ones(input.shape[:2]) if passed.token_mask is None else passed.token_mask
        assert passed.residual_positions is not None, "sequence makes them"
        routing = super().forward(input, router.Tokens(counted, passed.residual_positions, len(input)), passed)
        taken = torch.ones_like(routing.experts, dtype=torch.bool) if routing.kept is None else routing.kept
        shape = len(routing.experts), self.config.num_experts or 0
        probs = routing.probs.new_zeros(shape).scatter(1, routing.experts, routing.probs * taken)
        return probs, taken.new_zeros(shape).scatter(1, routing.experts, taken)


PARTS = (SelfAttention, DotProductAttention, MLP, TopKRouter)
"""The classes of the parts of a layer."""
