"""Choose the parts of each layer from the configuration."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import nn

from megatron_core.config import ModelConfig
from megatron_core.config.attention import AttentionKind, add_attention
from megatron_core.config.mixers import mixer_of
from megatron_core.feature import layer_hooks, load_hook
from megatron_core.transformer.attention import SelfAttention
from megatron_core.transformer.context import LayerContext
from megatron_core.transformer.core_attention import CoreAttention
from megatron_core.transformer.mlp import MLP
from megatron_core.transformer.norm import HeadsNorm, L2Norm, NoNorm, Norm, NormOfEachHead, norm_of

TILED_ATTENTION = "tiled_attention"
"""Name in ``Feature.layers`` of the core attention of layers with sinks, and of sequences over several ranks."""


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """The constructors of a layer's parts, under the names of the parts (Megatron's ``TransformerLayerSubmodules``).

    Each constructor receives the model's ``LayerContext``. Attention and MLP also receive the layer's global number,
    from 0; norms receive their size and ``partial_grad``, like ``Norm``.
    """

    self_attention: Callable[[LayerContext, int], nn.Module] | None
    """With the same ``forward(hidden, context)`` as ``SelfAttention``; None: the layer has only an MLP."""
    mlp: Callable[[LayerContext, int], nn.Module] | None
    """With the same ``forward(hidden, context)`` as ``MLP``; the ``SequenceContext`` collects auxiliary losses.
    None: the layer has only attention or a recurrence."""
    input_layernorm: Callable[..., nn.Module] = Norm
    pre_mlp_layernorm: Callable[..., nn.Module] | None = Norm
    """None: attention and MLP share the first norm, with ``parallel_residual``."""
    post_self_attn_layernorm: Callable[..., nn.Module] | None = None
    """Norm of the attention output, before the residual addition; None: no norm."""
    post_mlp_layernorm: Callable[..., nn.Module] | None = None
    auxiliary_losses: tuple[str, ...] = ()
    """Names of the auxiliary losses added by the layer; every rank needs the names of all layers."""


ATTENTION_LAYERS: dict[str, Callable[..., nn.Module]] = {"grouped_query": SelfAttention}
"""The layer of each kind of attention in ``config.attention.ATTENTION_KINDS``, by name; features have others.

Its constructor is called as ``SelfAttention``'s: with the context, the layer's number, and the constructors
``core_attention`` and ``qk_layernorm`` (None without ``qk_layernorm``).
"""


def mixer_layer(name: str) -> Callable[..., nn.Module]:
    """Return the layer of a kind of attention or recurrence, which a feature may provide (``Feature.layers``)."""
    return ATTENTION_LAYERS[name] if name in ATTENTION_LAYERS else load_hook(layer_hooks()[name])


def register_attention(attention: type[AttentionKind], layer: Callable[..., nn.Module]) -> None:
    """Make a kind of attention from outside of this package available as ``--attention-attention NAME``.

    Call this on every rank before the configuration is checked. Errors: ``ConfigError`` if the name is taken.
    """
    add_attention(attention)
    ATTENTION_LAYERS[attention.name] = layer


def core_attention_of(
    context: LayerContext, layer_number: int, *, window_size: tuple[int, int] | None = None
) -> nn.Module:
    """Return a layer's core attention: ``CoreAttention``, or that of a feature."""
    config = context.config
    # The log-sum-exp of each query, which attention in tiles computes, merges the parts of a sequence, and adds a sink.
    in_tiles = context.cp.whole.size() > 1 or (config.has_sinks and config.attention_backend != "unfused")
    core_attention = context.parallel.arithmetic.core_attention
    if core_attention is None:
        core_attention = load_hook(layer_hooks()[TILED_ATTENTION]) if in_tiles else CoreAttention
    return core_attention(context, layer_number, window_size=window_size)


LayerSpecs = Callable[[ModelConfig, int], LayerSpec]
"""Function from a configuration and a layer's global number, from 0, to the specification of that layer."""


def layer_spec(config: ModelConfig, layer_number: int) -> LayerSpec:
    """Return the specification of a layer of this project's models.

    Other models can modify the result with ``dataclasses.replace`` in their own ``LayerSpecs``.
    """
    norm = norm_of(config)
    before = NoNorm if config.norm_placement == "post" else norm
    after = None if config.norm_placement == "pre" else norm
    head_norm: type[nn.Module] = L2Norm if config.qk_l2_norm else Norm
    if config.qk_layernorm_over_heads or config.qk_layernorm_weight_per_head:
        head_norm = HeadsNorm if config.qk_layernorm_over_heads else NormOfEachHead
    l2_norm = config.qk_l2_norm and (config.has_rotary(layer_number) or not config.qk_l2_norm_rotary_only)
    mixer: Callable[..., nn.Module] | None = None
    loss_names: tuple[str, ...] = ()
    if config.has_mixer(layer_number):
        mixer_kind = mixer_of(config, layer_number)
        constructors = {
            "core_attention": partial(core_attention_of, window_size=config.window_of_layer(layer_number)),
            "qk_layernorm": head_norm if config.qk_layernorm or l2_norm else None,
        }
        # A kind that combines others gets their constructors and not their layers, so that it can name its own
        # submodules.
        if mixer_kind.mixers:
            mixers = {
                name: partial(mixer_layer(inner.name), **constructors) for name, inner in mixer_kind.mixers.items()
            }
            mixer = partial(mixer_layer(mixer_kind.name), mixers=mixers)
        else:
            layer = mixer_layer(mixer_kind.name)
            mixer = partial(layer, **constructors)
            loss_names = _loss_names(layer, config)
    mlp: Callable[..., nn.Module] | None = None
    if (name := config.feed_forward_name(layer_number)) is not None:
        mlp = MLP if name == "mlp" else load_hook(layer_hooks()[name])
        loss_names = (*loss_names, *_loss_names(mlp, config))
    return LayerSpec(
        input_layernorm=before,
        pre_mlp_layernorm=None if config.parallel_residual_shared_norm else before,
        post_self_attn_layernorm=after,
        post_mlp_layernorm=after,
        self_attention=mixer,
        mlp=mlp,
        auxiliary_losses=loss_names,
    )


def _loss_names(layer: Callable[..., nn.Module], config: ModelConfig) -> tuple[str, ...]:
    return getattr(layer, "auxiliary_loss_names", lambda config: ())(config)


def auxiliary_loss_names(config: ModelConfig, layer_specs: LayerSpecs = layer_spec) -> tuple[str, ...]:
    """Return the names of the auxiliary losses of all layers of the model, in the same order on every rank."""
    count = config.num_layers + config.added_layers
    # Of all layers and not of a stage's: the values are summed over the pipeline in one tensor, with one order of
    # names.
    of_layers = {name for i in range(count) for name in layer_specs(config, i).auxiliary_losses}
    return (*sorted(of_layers), *mtp_loss_names(config), *config.head_loss_names)


def mtp_loss_names(config: ModelConfig) -> tuple[str, ...]:
    """Return the names of the multi-token prediction losses, numbered by the distance from the next token."""
    return tuple(f"mtp_{depth + 1}_loss" for depth in range(config.added_layers))
