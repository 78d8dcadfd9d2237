"""Modules of the caller in place of the engine's."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from megatron.core.enums import AttnMaskType
from megatron.core.transformer.spec_utils import build_module, get_module
from megatron_core.errors import ConfigError
from megatron_core.parallel.sharding import replicated, split
from megatron_core.transformer.context import LayerContext, SequenceContext


class Foreign(nn.Module):
    """A caller's module in place of one of the engine's."""

    def __init__(self, module: nn.Module, call: Callable[..., tuple[Tensor, Tensor | None]]) -> None:
        super().__init__()
        self.module, self.call = module, call

    def forward(self, hidden: Tensor, context: SequenceContext) -> tuple[Tensor, Tensor | None]:
        """``[s, b, h]`` -> (the same shape, the bias to add or None)."""
        return self.call(self.module, hidden, context)


def foreign(config: Any, spec: Any, call: Callable[..., Any]) -> Callable[[LayerContext, int], nn.Module]:
    """Return the constructor of a layer's part from the caller's ``spec``."""

    def build(context: LayerContext, number: int) -> nn.Module:
        module = build_module(spec, config=config, layer_number=number + 1)
        return Foreign(described(module, context), call)

    return build


def foreign_norm(config: Any, spec: Any, context: LayerContext, size: int, **kwargs: Any) -> nn.Module:
    """Build a caller's norm."""
    module = build_module(spec, config=config, hidden_size=size, eps=config.layernorm_epsilon)
    return described(module, context)


def described(module: nn.Module, context: LayerContext, partial_grad: bool = False) -> nn.Module:
    """Describe the parameters of a caller's module that the engine's layers have not made, and keep their values.

    Megatron's attributes say how they are split: ``tensor_model_parallel`` with ``partition_dim``, or
    ``sequence_parallel`` for whole weights whose gradients are summed over tensor-parallel ranks, which
    ``partial_grad`` sets for all.
    """
    rank, size = context.tp_group.rank(), context.tp_group.size()
    for parameter in module.parameters():
        if hasattr(parameter, "shard_spec"):
            continue
        own: Any = parameter
        if getattr(own, "tensor_model_parallel", False):
            shape = list(parameter.shape)
            shape[own.partition_dim] *= size
            own.shard_spec = split(tuple(shape), own.partition_dim, rank, size)
        else:
            summed = partial_grad or getattr(own, "sequence_parallel", False)
            own.shard_spec = replicated(tuple(parameter.shape), rank, partial_grad=summed)
        own.init_method = partial(_copy_part, parameter)
    return module


def _copy_part(parameter: Any, drawn: Tensor) -> None:
    """Copy this rank's part into the whole tensor, of which only that part is used."""
    for part in parameter.shard_spec.parts:
        drawn[part.whole.index].copy_(parameter.detach()[part.local.index])


def with_core_attention(config: Any, attention: Callable[..., nn.Module], spec: Any) -> Callable[..., nn.Module]:
    """Return the constructor ``attention`` of a layer with the caller's module ``spec`` as its core attention.

    The module is built as Megatron Core builds it, and called as ``module(query, key, value, attention_mask,
    attn_mask_type=)``: queries ``[s, b, heads, d]``, keys and values ``[s, b, groups, d]`` -> ``[s, b, heads d]``. It
    divides scores by the square root of d. Raises ConfigError for settings that it would have to know.
    """
    wrong = {
        "context_parallel_size": config.context_parallel_size > 1,
        "softmax_type": config.softmax_type != "vanilla",
        "softmax_scale": config.softmax_scale is not None,
        "multi_latent_attention": config.multi_latent_attention,
    }
    if found := [f"{name}={getattr(config, name)}" for name, value in wrong.items() if value]:
        raise ConfigError(
            f"core_attention={get_module(spec)} is not a class of this package, and does not support "
            f"{', '.join(found)}; use DotProductAttention, or replace the whole attention by your module"
        )
    given: Any = attention
    return partial(given.func, **given.keywords | {"core_attention": partial(ForeignAttention, config, spec)})


class ForeignAttention(nn.Module):
    """The caller's module with the arguments of the engine's core attention."""

    def __init__(self, config: Any, spec: Any, context: LayerContext, layer_number: int, **settings: Any) -> None:
        super().__init__()
        module = build_module(
            spec,
            config=config,
            layer_number=layer_number + 1,
            attn_mask_type=AttnMaskType.causal,
            attention_type="self",
        )
        # Each rank computes its own heads, so that its gradients are parts.
        self.module = described(module, context, partial_grad=True)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, context: SequenceContext) -> Tensor:
        """Return the caller's output; ConfigError for packed documents."""
        if context.documents is not None:
            raise ConfigError(
                f"{type(self.module).__name__}: packed documents are not supported by a core_attention of your own; "
                "replace the whole attention by your module, or pass an attention mask"
            )
        kind = AttnMaskType.causal if context.attention_mask is None else AttnMaskType.arbitrary
        return self.module(query, key, value, context.attention_mask, attn_mask_type=kind)
