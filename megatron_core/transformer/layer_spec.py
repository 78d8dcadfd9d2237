"""What each layer of the model is made of, chosen from the configuration in one place."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import nn

from megatron_core.config import ModelConfig
from megatron_core.transformer.attention import SelfAttention
from megatron_core.transformer.context import LayerContext
from megatron_core.transformer.latent_attention import LatentAttention
from megatron_core.transformer.mlp import MLP
from megatron_core.transformer.moe import MoELayer, moe_loss_names
from megatron_core.transformer.norm import HeadsNorm, Norm
from megatron_core.transformer.sharded_attention import core_attention_of


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """The constructors of a layer's parts, named as the parts are (Megatron's ``TransformerLayerSubmodules``).

    Each is called with the model's ``LayerContext``; attention and MLP also with the layer's global number from 0,
    norms with their size and ``partial_grad``, as ``Norm``.
    """

    self_attention: Callable[[LayerContext, int], nn.Module]
    """``forward(hidden, context)`` as ``SelfAttention``'s."""
    mlp: Callable[[LayerContext, int], nn.Module]
    """``forward(hidden, context)`` as ``MLP``'s; ``context`` is a ``SequenceContext``, which takes auxiliary losses."""
    input_layernorm: Callable[..., nn.Module] = Norm
    pre_mlp_layernorm: Callable[..., nn.Module] = Norm
    post_self_attn_layernorm: Callable[..., nn.Module] | None = None
    """Of attention's output, before the residual sum; None: there is none."""
    post_mlp_layernorm: Callable[..., nn.Module] | None = None
    auxiliary_losses: tuple[str, ...] = ()
    """Names of the auxiliary losses that the layer adds, so that every rank knows those of all layers."""


LayerSpecs = Callable[[ModelConfig, int], LayerSpec]
"""From a configuration and a layer's global number, from 0, to what that layer is made of."""


def layer_spec(config: ModelConfig, layer_number: int) -> LayerSpec:
    """The layers of this project's own models; a ``LayerSpecs`` for others starts from this one with
    ``dataclasses.replace``."""
    has_experts = config.has_experts(layer_number)
    before = nn.Identity if config.norm_placement == "post" else Norm
    after = None if config.norm_placement == "pre" else Norm
    head_norm = HeadsNorm if config.qk_layernorm_over_heads else Norm
    attention = LatentAttention if config.multi_latent_attention else SelfAttention
    return LayerSpec(
        input_layernorm=before,
        pre_mlp_layernorm=before,
        post_self_attn_layernorm=after,
        post_mlp_layernorm=after,
        self_attention=partial(
            attention,
            core_attention=partial(core_attention_of, window_size=config.window_of_layer(layer_number)),
            qk_layernorm=head_norm if config.qk_layernorm else None,
        ),
        mlp=MoELayer if has_experts else MLP,
        auxiliary_losses=moe_loss_names(config) if has_experts else (),
    )


def auxiliary_loss_names(config: ModelConfig, layer_specs: LayerSpecs = layer_spec) -> tuple[str, ...]:
    """The auxiliary losses of all layers of the model, in the same order on every rank."""
    of_layers = {name for i in range(config.num_layers) for name in layer_specs(config, i).auxiliary_losses}
    return (*sorted(of_layers), *mtp_loss_names(config))


def mtp_loss_names(config: ModelConfig) -> tuple[str, ...]:
    """The losses of multi-token prediction, by how many tokens ahead of the next one."""
    return tuple(f"mtp_{depth + 1}_loss" for depth in range(config.mtp_num_layers or 0))
