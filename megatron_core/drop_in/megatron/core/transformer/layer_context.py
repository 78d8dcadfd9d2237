"""Converts a ``TransformerConfig`` and layer specifications to the engine's layer contexts and specifications."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.tensor_parallel.random import current_seed
from megatron.core.transformer.foreign import foreign, foreign_norm, with_core_attention
from megatron.core.transformer.moe.expert_names import pattern_of
from megatron.core.transformer.names import named_experts, norm_of_projection
from megatron.core.transformer.spec_utils import IdentityOp, ModuleSpec, WrappedTorchNorm, build_module, get_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron_core import parallel_state
from megatron_core.config import ModelConfig, ParallelConfig, RunConfig
from megatron_core.config.layer_settings import LayerPart
from megatron_core.config.partition import Ends, layers_by_stage, partition
from megatron_core.errors import ConfigError, LayoutError
from megatron_core.features.experts.layer import MoELayer
from megatron_core.features.latent_attention.attention import LatentAttention
from megatron_core.features.latent_attention.settings import LatentAttentionConfig
from megatron_core.features.layer_sizes.linear_replacement import LinearReplacement
from megatron_core.features.layer_sizes.settings import LAYERS_JSON
from megatron_core.parallel.current import current
from megatron_core.parallel.groups import WHOLE_SEQUENCES, ParallelGroups
from megatron_core.parallel.initialization import draw_by_name
from megatron_core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron_core.transformer.attention import SelfAttention
from megatron_core.transformer.context import LayerContext, PackedDocuments, SequenceContext
from megatron_core.transformer.layer_spec import LayerSpec, LayerSpecs, layer_spec
from megatron_core.transformer.mlp import MLP
from megatron_core.transformer.norm import Norm


@dataclass
class SelfAttentionSubmodules:
    """The parts of ``SelfAttention`` in a layer's specification; they must be classes of the engine.

    ``core_attention`` can be the caller's, see ``foreign.with_core_attention``.
    """

    linear_qkv: Any = ColumnParallelLinear
    core_attention: Any = None
    linear_proj: Any = RowParallelLinear
    q_layernorm: Any = None
    k_layernorm: Any = None


@dataclass
class MLASelfAttentionSubmodules:
    """The parts of ``MLASelfAttention`` in a layer's specification; they must be classes of the engine."""

    linear_proj: Any = None
    q_layernorm: Any = None
    kv_layernorm: Any = None
    linear_q_proj: Any = None
    linear_q_down_proj: Any = None
    linear_q_up_proj: Any = None
    linear_kv_down_proj: Any = None
    linear_kv_up_proj: Any = None
    linear_qkv_down_proj: Any = None
    core_attention: Any = None


@dataclass
class MLPSubmodules:
    """The parts of ``MLP`` in a layer's specification; they must be classes of the engine."""

    linear_fc1: Any = ColumnParallelLinear
    linear_fc2: Any = RowParallelLinear
    activation_func: Any = None


@dataclass
class MoESubmodules:
    """Experts, shared experts and router in a layer's specification; the engine's are always used."""

    experts: Any = None
    shared_experts: Any = None
    router: Any = None


@dataclass
class TransformerLayerSubmodules:
    """The parts of a layer under Megatron's names: classes of the engine or of the caller.

    A caller's norm is built as ``module(config=, hidden_size=, eps=)``; attention and MLP as ``module(config=,
    layer_number=)`` with the layer's number from 1 and return (output, bias or None): an MLP of the hidden states,
    attention of these and ``attention_mask``. ``IdentityOp`` in place of a norm
    omits the norm.
    """

    input_layernorm: Any = Norm
    self_attention: Any = SelfAttention
    self_attn_bda: Any = None
    pre_mlp_layernorm: Any = Norm
    mlp: Any = MLP
    mlp_bda: Any = None


@dataclass
class TransformerBlockSubmodules:
    """The specifications of all layers of the model and of the final norm; the engine's final norm is always used."""

    layer_specs: list[Any] | None = None
    layer_norm: Any = None


@dataclass(frozen=True)
class LayerPattern:
    """The part of each layer as a letter, instead of a layer's specification; see ``HybridConfig``."""

    letters: str
    ahead: str | None = None
    """Parts of a layer of multi-token prediction."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Other settings of the engine that the letters imply."""


def layer_context(
    config: TransformerConfig, model: ModelConfig, pg_collection: Any = None, tp_group: Any = None
) -> LayerContext:
    """Return the context from which layers of ``model`` are built, with the current or the given process groups."""
    tp_group = getattr(pg_collection, "tp", None) or tp_group
    groups = current()
    if tp_group is not None and tp_group is not groups.group("tp"):
        groups = ParallelGroups.single()
    options = replace(config.parallel_options(), perform_initialization=False)
    cp = groups.context if groups.size("cp") > 1 else WHOLE_SEQUENCES
    return LayerContext(model, options, tp_group or groups.group("tp"), current_seed(), groups, cp)


def stage_layers(config: TransformerConfig, vp_stage: int | None = None, pp_rank: int | None = None) -> range:
    """Return the layers, numbered from 0, on chunk ``vp_stage`` of a pipeline rank, by default this one.

    The default of ``vp_stage`` is that of ``set_virtual_pipeline_model_parallel_rank``, which older programs call.

    As in Megatron Core, the split is ``pipeline_model_parallel_layout``, or has given sizes of the first and the last
    stage, or is even, where embedding and loss may count as layers.
    """
    ranks, chunks = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size or 1
    if pp_rank is None:
        pp_rank = parallel_state.get_pipeline_model_parallel_rank() if ranks > 1 else 0
    if vp_stage is None and chunks > 1:
        vp_stage = parallel_state.get_virtual_pipeline_model_parallel_rank()
    if not 0 <= pp_rank < ranks or not 0 <= (vp_stage or 0) < chunks:
        raise LayoutError(
            f"pp_rank={pp_rank}, vp_stage={vp_stage} is outside of the {ranks} ranks with {chunks} chunks"
        )
    layout = config.pipeline_model_parallel_layout
    if layout is not None:
        first = layout.get_layer_offset(vp_stage=vp_stage or 0, pp_rank=pp_rank)
        return range(first, first + layout.get_num_layers_to_build(vp_stage=vp_stage or 0, pp_rank=pp_rank))
    return _all_stages(config, ranks * chunks)[(vp_stage or 0) * ranks + pp_rank]


def _all_stages(config: TransformerConfig, stages: int) -> list[range]:
    ends = (config.num_layers_in_first_pipeline_stage, config.num_layers_in_last_pipeline_stage)
    if ends != (None, None):
        settings = {
            "num_layers": config.num_layers,
            "pipeline_model_parallel_size": config.pipeline_model_parallel_size,
            "decoder_first_pipeline_num_layers": ends[0],
            "decoder_last_pipeline_num_layers": ends[1],
        }
        run = RunConfig.from_flat(settings)
        found = layers_by_stage(run, 1, stages)
        if found[-1].stop != config.num_layers:
            raise LayoutError(f"the stages have {found[-1].stop} layers, but num_layers={config.num_layers}")
        return found
    costs = (config.account_for_embedding_in_pipeline_split, config.account_for_loss_in_pipeline_split)
    if (config.num_layers + sum(costs)) % stages:
        raise LayoutError(
            f"num_layers={config.num_layers} cannot be divided by {stages} stages (ranks x chunks); give "
            "num_layers_in_first_pipeline_stage, or a pipeline_model_parallel_layout"
        )
    return partition(config.num_layers, stages, Ends(Fraction(costs[0]), Fraction(costs[1]), as_layers=True))


def layer_specs_of(config: TransformerConfig, spec: Any) -> LayerSpecs:
    """Return the engine's specifications for ``spec``: the ModuleSpec or the submodules of a layer or of a block."""
    if isinstance(spec, LayerPattern):
        return layer_spec
    if isinstance(spec, ModuleSpec) and isinstance(spec.submodules, TransformerBlockSubmodules):
        spec = spec.submodules
    if isinstance(spec, TransformerBlockSubmodules):
        specs = list(spec.layer_specs or ())
        if len(specs) != config.num_layers:
            raise ConfigError(f"{len(specs)} layer_specs for num_layers={config.num_layers}; give one for each layer")
        # Layers of multi-token prediction use the specification of the last layer.
        return lambda model, number: _layer_spec(config, model, number, specs[min(number, len(specs) - 1)])
    return lambda model, number: _layer_spec(config, model, number, spec)


def _layer_spec(config: TransformerConfig, model: ModelConfig, number: int, spec: Any) -> LayerSpec:
    parts = spec if isinstance(spec, TransformerLayerSubmodules) else getattr(spec, "submodules", None)
    if not isinstance(parts, TransformerLayerSubmodules):
        raise ConfigError(f"{spec!r} is not a specification of a transformer layer; see get_gpt_layer_local_spec")
    for part in (parts.self_attention, parts.mlp):
        check_submodules(model, getattr(part, "submodules", None))
    own = layer_spec(model, number)
    attention: Any = own.self_attention
    changes: dict[str, Any] = {}
    has_experts = is_ours(parts.mlp, MoELayer)
    block = model.block_of(number)
    if block.mlp.no_op or block.mlp.linear:
        _check_replaced(number, "mlp", block.mlp, parts.mlp)
    elif is_ours(parts.mlp, MLP, MoELayer):
        if has_experts != (model.feed_forward_name(number) == "experts"):
            raise ConfigError(
                f"layer {number}: the specification has {'experts' if has_experts else 'a dense MLP'}, contrary to "
                f"num_moe_experts={config.num_moe_experts} with moe_layer_freq={config.moe_layer_freq}; use "
                "get_gpt_decoder_block_spec, or change one of them"
            )
        experts = getattr(getattr(parts.mlp, "submodules", None), "experts", None)
        pattern = pattern_of(get_module(experts), grouped_gemm=config.moe_grouped_gemm)
        if has_experts and pattern is not None:
            changes["mlp"] = named_experts(own.mlp, pattern)
    elif _extends_ours(parts.mlp, MoELayer):
        changes["mlp"] = _built(config, parts.mlp)
    else:
        changes["mlp"] = foreign(config, parts.mlp, lambda module, hidden, context: module(hidden))
        changes["auxiliary_losses"] = ()
    has_latents = model.section(LatentAttentionConfig).multi_latent_attention
    if block.attention.no_op or block.attention.linear:
        _check_replaced(number, "self_attention", block.attention, parts.self_attention)
    elif _extends_ours(parts.self_attention, SelfAttention, LatentAttention):
        changes["self_attention"] = _built(config, parts.self_attention)
    elif is_ours(parts.self_attention, LatentAttention) and not has_latents:
        raise ConfigError(
            f"layer {number}: the specification has {get_module(parts.self_attention)}, but multi_latent_attention is "
            "False; pass an MLATransformerConfig"
        )
    elif is_ours(parts.self_attention, SelfAttention, LatentAttention):
        has_norms = has_latents and attention.keywords["qk_layernorm"] is Norm
        if has_norms and _normalizes(parts.self_attention, "linear_q_up_proj", "linear_kv_up_proj"):
            attention = changes["self_attention"] = partial(attention, qk_layernorm=norm_of_projection)
        core = getattr(getattr(parts.self_attention, "submodules", None), "core_attention", None)
        if core is not None and not is_ours(core):
            changes["self_attention"] = with_core_attention(config, attention, core)
    else:
        call = lambda module, hidden, context: module(hidden, attention_mask=context.attention_mask)  # noqa: E731
        changes["self_attention"] = foreign(config, parts.self_attention, call)
    for name, after in (("input_layernorm", "self_attention"), ("pre_mlp_layernorm", "mlp")):
        norm = getattr(parts, name)
        if get_module(norm) is IdentityOp:
            if not _normalizes(getattr(parts, after), "linear_qkv", "linear_fc1"):
                changes[name] = nn.Identity
            elif getattr(own, name) is Norm and is_ours(getattr(parts, after)) and not (has_latents and after != "mlp"):
                changes[name] = norm_of_projection
        elif not is_ours(norm, Norm, WrappedTorchNorm):
            changes[name] = partial(foreign_norm, config, norm)
    return replace(own, **changes)


def _check_replaced(number: int, name: str, part: LayerPart, spec: Any) -> None:
    """Raise ConfigError unless the specification of a part that is absent or a linear layer names this."""
    wanted = IdentityOp if part.no_op else LinearReplacement
    if get_module(spec) is not wanted:
        raise ConfigError(
            f"layer {number}: {name}={get_module(spec)} in the specification, but {wanted.__name__} in "
            f"{LAYERS_JSON}; use get_gpt_heterogeneous_layer_spec"
        )


def is_ours(part: Any, *kinds: type) -> bool:
    """Whether a part is one of these classes and defined in this package."""
    module = get_module(part)
    own = isinstance(module, type) and module.__module__.startswith(("megatron.core.", "megatron_core."))
    return own and (not kinds or issubclass(module, kinds))


def _extends_ours(part: Any, *kinds: type) -> bool:
    """Whether a part is a caller's subclass of one of these classes."""
    module = get_module(part)
    return isinstance(module, type) and issubclass(module, kinds) and not is_ours(part)


def _built(config: TransformerConfig, spec: Any) -> Callable[[LayerContext, int], nn.Module]:
    return lambda context, number: build_module(spec, config=config, layer_number=number + 1)


def _normalizes(spec: Any, *projections: str) -> bool:
    """Whether one of these projections in the specification of attention or of an MLP includes the norm before it."""
    parts = getattr(spec, "submodules", None)
    modules = [get_module(getattr(parts, name, None)) for name in projections]
    return any(getattr(module, "normalizes_input", False) for module in modules)


def check_submodules(model: ModelConfig, parts: Any) -> None:
    """Raise ConfigError for parts of attention or of an MLP that would not be used."""
    if not isinstance(parts, SelfAttentionSubmodules | MLASelfAttentionSubmodules | MLPSubmodules | MoESubmodules):
        return
    for name, part in vars(parts).items():
        if part is not None and name != "core_attention" and not is_ours(part):
            raise ConfigError(
                f"{type(parts).__name__}: {name}={get_module(part)} is not a class of this package; replace the whole "
                "attention or MLP by your module"
            )
        is_norm = name in ("q_layernorm", "k_layernorm") and part is not None and get_module(part) is not IdentityOp
        if is_norm and not (model.qk_layernorm and is_ours(part, Norm, WrappedTorchNorm)):
            raise ConfigError(f"{name}={get_module(part)} needs qk_layernorm=True and the norm of config.normalization")


class SampleNumbers:
    """Numbers the sequences that pass through a model, as keys of dropout: Megatron's calls have no such argument.

    Every training call takes the next numbers, different ones on each data-parallel rank. All ranks of a pipeline see
    the same micro-batches in the same order.
    """

    def __init__(self, groups: ParallelGroups) -> None:
        self.groups, self.taken = groups, 0

    def take(self, batch: int, device: torch.device) -> Tensor:
        """Return the numbers of a micro-batch of ``batch`` sequences: int64 ``[batch]``."""
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
    """Return the engine's context of ``hidden`` ``[s, b, h]``.

    ``rotary_pos_emb`` ``[s, 1, 1, r]`` has Megatron's angles, each twice. ``padding_mask`` ``[b, s]`` is True for
    padding.
    """
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


def draw_weights(module: nn.Module, seed: int, prefix: str) -> None:
    """Initialize the parameters of the engine's layers as parts of a model, under the names ``prefix + name``."""
    for name, parameter in module.named_parameters():
        if hasattr(parameter, "init_method"):
            draw_by_name(prefix + name, parameter, seed)
