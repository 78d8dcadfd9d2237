"""From a ``TransformerConfig`` and a layer's specification to what layers are built from."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec, build_module, get_module
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron_core.config import ModelConfig
from megatron_core.errors import ConfigError
from megatron_core.parallel.current import current
from megatron_core.parallel.groups import WHOLE_SEQUENCES, ParallelGroups
from megatron_core.tensor_parallel.random import current_seed
from megatron_core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron_core.transformer.context import LayerContext, PackedDocuments, SequenceContext
from megatron_core.transformer.layer_spec import LayerSpec, LayerSpecs, layer_spec
from megatron_core.transformer.mlp import MLP, MLPSubmodules
from megatron_core.transformer.moe import MoELayer
from megatron_core.transformer.norm import Norm


@dataclass
class MoESubmodules:
    """Experts, shared experts and router of a layer's specification; they are always this package's."""

    experts: Any = None
    shared_experts: Any = None
    router: Any = None


@dataclass
class TransformerLayerSubmodules:
    """The parts of a layer under Megatron's names: classes of this package, or a caller's own.

    A caller's norm is built as ``module(config=, hidden_size=, eps=)``; attention and MLP as ``module(config=,
    layer_number=)`` with the layer's number from 1 and return (output, bias or None): an MLP of the hidden states,
    attention of these and ``attention_mask``. ``IdentityOp`` as a norm leaves it out.
    """

    input_layernorm: Any = Norm
    self_attention: Any = SelfAttention
    self_attn_bda: Any = None
    pre_mlp_layernorm: Any = Norm
    mlp: Any = MLP
    mlp_bda: Any = None


@dataclass
class TransformerBlockSubmodules:
    """The specifications of all layers of the model, and of the final norm, which is always this package's."""

    layer_specs: list[Any] | None = None
    layer_norm: Any = None


def layer_context(
    config: TransformerConfig, model: ModelConfig, pg_collection: Any = None, tp_group: Any = None
) -> LayerContext:
    """What layers of ``model`` are built from, in the current layout or with the groups of ``pg_collection``."""
    tp_group = getattr(pg_collection, "tp", None) or tp_group
    groups = current() if tp_group is None or tp_group is current_tp() else ParallelGroups.single()
    options = replace(config.parallel_options(), perform_initialization=False)
    cp = groups.context if groups.size("cp") > 1 else WHOLE_SEQUENCES
    return LayerContext(model, options, tp_group or groups.group("tp"), current_seed(), groups, cp)


def current_tp() -> Any:
    """The tensor-parallel group of the current layout."""
    return current().group("tp")


def layer_specs_of(config: TransformerConfig, spec: Any) -> LayerSpecs:
    """This package's specifications of what ``spec`` says: a layer's ModuleSpec or its submodules, or a block's."""
    if isinstance(spec, ModuleSpec) and isinstance(spec.submodules, TransformerBlockSubmodules):
        spec = spec.submodules
    if isinstance(spec, TransformerBlockSubmodules):
        specs = list(spec.layer_specs or ())
        if len(specs) != config.num_layers:
            raise ConfigError(f"{len(specs)} layer_specs for num_layers={config.num_layers}; give one for each layer")
        # A layer of multi-token prediction is as the last one.
        return lambda model, number: _layer_spec(config, model, number, specs[min(number, len(specs) - 1)])
    return lambda model, number: _layer_spec(config, model, number, spec)


def _layer_spec(config: TransformerConfig, model: ModelConfig, number: int, spec: Any) -> LayerSpec:
    parts = spec if isinstance(spec, TransformerLayerSubmodules) else getattr(spec, "submodules", None)
    if not isinstance(parts, TransformerLayerSubmodules):
        raise ConfigError(f"{spec!r} is no specification of a transformer layer; see get_gpt_layer_local_spec")
    for part in (parts.self_attention, parts.mlp):
        check_submodules(model, getattr(part, "submodules", None))
    own = layer_spec(model, number)
    changes: dict[str, Any] = {}
    has_experts = _is_ours(parts.mlp, MoELayer)
    if _is_ours(parts.mlp, MLP, MoELayer):
        if has_experts != model.has_experts(number):
            raise ConfigError(
                f"layer {number}: the specification has {'experts' if has_experts else 'a dense MLP'}, and "
                f"num_moe_experts={config.num_moe_experts} with moe_layer_freq={config.moe_layer_freq} says otherwise; "
                "use get_gpt_decoder_block_spec, or give both the same"
            )
    elif _extends_ours(parts.mlp, MoELayer):
        changes["mlp"] = _built(config, parts.mlp)
    else:
        changes["mlp"] = _foreign(config, parts.mlp, lambda module, hidden, context: module(hidden))
        changes["auxiliary_losses"] = ()
    if _extends_ours(parts.self_attention, SelfAttention):
        changes["self_attention"] = _built(config, parts.self_attention)
    elif not _is_ours(parts.self_attention, SelfAttention):
        call = lambda module, hidden, context: module(hidden, attention_mask=context.attention_mask)  # noqa: E731
        changes["self_attention"] = _foreign(config, parts.self_attention, call)
    for name, after in (("input_layernorm", "self_attention"), ("pre_mlp_layernorm", "mlp")):
        norm = getattr(parts, name)
        if get_module(norm) is IdentityOp:
            if not _normalizes(getattr(parts, after)):
                changes[name] = nn.Identity
        elif not _is_ours(norm, Norm, WrappedTorchNorm):
            changes[name] = partial(_foreign_norm, config, norm)
    return replace(own, **changes)


def _is_ours(part: Any, *kinds: type) -> bool:
    """Whether a part is one of these classes, or this package's under another name."""
    module = get_module(part)
    own = isinstance(module, type) and module.__module__.startswith(("megatron.core.", "megatron_core."))
    return own and (not kinds or issubclass(module, kinds))


def _extends_ours(part: Any, *kinds: type) -> bool:
    """Whether a part is a caller's class that extends one of these with Megatron's arguments, whose ``forward`` takes
    what a model passes, too."""
    module = get_module(part)
    return isinstance(module, type) and issubclass(module, kinds) and not _is_ours(part)


def _built(config: TransformerConfig, spec: Any) -> Callable[[LayerContext, int], nn.Module]:
    return lambda context, number: build_module(spec, config=config, layer_number=number + 1)


def _normalizes(spec: Any) -> bool:
    """Whether the first projection of attention or of an MLP has the norm before it, so that the layer names none."""
    parts = getattr(spec, "submodules", None)
    first = getattr(parts, "linear_qkv", None) or getattr(parts, "linear_fc1", None)
    return getattr(get_module(first), "normalizes_input", False)


def check_submodules(model: ModelConfig, parts: Any) -> None:
    """ConfigError for parts of attention or of an MLP that would not be used: a caller's own, other norms of heads."""
    if not isinstance(parts, SelfAttentionSubmodules | MLPSubmodules | MoESubmodules):
        return
    for name, part in vars(parts).items():
        if part is not None and not _is_ours(part):
            raise ConfigError(
                f"{type(parts).__name__}: {name}={get_module(part)} is not of this package; replace attention or "
                "MLP as a whole by a module of your own"
            )
        is_norm = name in ("q_layernorm", "k_layernorm") and part is not None and get_module(part) is not IdentityOp
        if is_norm and not (model.qk_layernorm and _is_ours(part, Norm, WrappedTorchNorm)):
            raise ConfigError(
                f"{name}={get_module(part)} needs qk_layernorm=True, and a norm as config.normalization says"
            )


class _Foreign(nn.Module):
    """A caller's module in the place of one of this package's."""

    def __init__(self, module: nn.Module, call: Callable[..., tuple[Tensor, Tensor | None]]) -> None:
        super().__init__()
        self.module, self.call = module, call

    def forward(self, hidden: Tensor, context: SequenceContext) -> tuple[Tensor, Tensor | None]:
        return self.call(self.module, hidden, context)


def _foreign(
    config: TransformerConfig, spec: Any, call: Callable[..., Any]
) -> Callable[[LayerContext, int], nn.Module]:
    return lambda context, number: _Foreign(build_module(spec, config=config, layer_number=number + 1), call)


def _foreign_norm(config: TransformerConfig, spec: Any, context: LayerContext, size: int, **kwargs: Any) -> nn.Module:
    return build_module(spec, config=config, hidden_size=size, eps=config.layernorm_epsilon)


class SampleNumbers:
    """Numbers of the sequences that pass through a model, which key its dropout: Megatron's calls bring none.

    Every training call takes the next ones, on each data-parallel rank its own; all ranks of a pipeline see the same
    micro-batches in the same order.
    """

    def __init__(self, groups: ParallelGroups) -> None:
        self.groups, self.taken = groups, 0

    def take(self, batch: int, device: torch.device) -> Tensor:
        """The numbers of a micro-batch of ``batch`` sequences: int64 ``[batch]``."""
        first = self.taken + self.groups.index("dp") * batch
        self.taken += self.groups.size("dp") * batch
        return torch.arange(first, first + batch, device=device)


def sequence_context(
    context: LayerContext,
    hidden: Tensor,
    attention_mask: Tensor | None,
    rotary_pos_emb: Tensor | None,
    sample_index: Tensor | None,
    padding_mask: Tensor | None = None,
    *,
    documents: PackedDocuments | None = None,
) -> SequenceContext:
    """What layers need to know of ``hidden`` ``[s, b, h]``; ``rotary_pos_emb`` ``[s, 1, 1, r]`` are Megatron's angles,
    each twice. ``padding_mask`` ``[b, s]`` is True for padding."""
    split = context.split
    length = hidden.shape[0] * (split.tp_size if split.sequence_parallel else 1)
    positions = split.positions(length * split.cp_size, hidden.device)
    rotary = None
    if rotary_pos_emb is not None:
        once = slice(None, None, 2) if context.config.rotary_interleaved else slice(rotary_pos_emb.shape[-1] // 2)
        angles = rotary_pos_emb[:, :, 0, once]
        rotary = angles.cos(), angles.sin()
    return SequenceContext(
        rotary=rotary,
        attention_mask=attention_mask,
        documents=documents,
        sample_index=sample_index,
        positions=positions,
        residual_positions=split.residual(positions),
        token_mask=None if padding_mask is None else (~padding_mask.bool()).transpose(0, 1).to(hidden.dtype),
    )
