"""Specifications of GPT layers; those of Transformer Engine differ only in the names of weights."""

from inspect import signature
from typing import Any

from megatron.core.extensions.transformer_engine import (
    TEDotProductAttention,
    TELayerNormColumnParallelLinear,
    TERowParallelLinear,
)
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.transformer.heterogeneous.heterogeneous_config import HeterogeneousTransformerConfig
from megatron.core.transformer.layer_context import (
    MLASelfAttentionSubmodules,
    MLPSubmodules,
    MoESubmodules,
    SelfAttentionSubmodules,
    TransformerBlockSubmodules,
    TransformerLayerSubmodules,
)
from megatron.core.transformer.moe.moe_layer import MoELayer, TEGroupedMLP
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
)
from megatron.core.transformer.spec_utils import IdentityFuncOp, IdentityOp, ModuleSpec, get_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron_core.drop_in.unsupported import unsupported
from megatron_core.errors import ConfigError
from megatron_core.features.layer_sizes.linear_replacement import LinearReplacement
from megatron_core.transformer import MLP, Norm, SelfAttention

_WITHOUT_EFFECT = ("kitchen_attention_backend", "use_te_op_fuser", "mla_down_proj_fusion")


def get_mlp_module_spec(
    use_te: bool = True,
    num_experts: int | None = None,
    moe_grouped_gemm: bool = False,
    fp8: Any = None,
    use_te_op_fuser: bool = False,
) -> ModuleSpec:
    """Return the specification of an MLP, or of a layer of experts with ``num_experts``; the others have no effect."""
    dense, sparse = (MLP, MLPSubmodules()), (MoELayer, MoESubmodules())
    module, submodules = dense if num_experts is None else sparse
    return ModuleSpec(module, submodules=submodules)


def get_gpt_layer_local_submodules(
    num_experts: int | None = None,
    moe_grouped_gemm: bool = False,
    qk_layernorm: bool = False,
    multi_latent_attention: bool = False,
    fp8: Any = None,
    normalization: str | None = None,
    qk_l2_norm: bool = False,
    **unsupported: Any,
) -> TransformerLayerSubmodules:
    """Return the parts of a layer; ``num_experts`` and ``multi_latent_attention`` change the classes.

    ``TransformerConfig`` determines norms, attention and precision: ``qk_layernorm``, ``normalization``,
    ``qk_l2_norm``, ``multi_latent_attention`` and ``fp8`` must be set there. ``moe_grouped_gemm`` has no effect. Raises
    ConfigError if another argument is set.
    """
    wrong = [name for name, value in unsupported.items() if value]
    wrong = [name for name in wrong if name not in _WITHOUT_EFFECT]
    if wrong:
        raise ConfigError(f"a layer specification with {', '.join(wrong)} is not supported; remove it")
    mlp = get_mlp_module_spec(num_experts=num_experts)
    metainfo = {
        "qk_layernorm": qk_layernorm,
        "qk_l2_norm": qk_l2_norm,
        "multi_latent_attention": multi_latent_attention,
    }
    set_ones = {name: value for name, value in metainfo.items() if value}
    plain, latent = (SelfAttention, SelfAttentionSubmodules()), (MLASelfAttention, MLASelfAttentionSubmodules())
    kind, parts = latent if multi_latent_attention else plain
    attention = ModuleSpec(kind, submodules=parts, metainfo=set_ones)
    if normalization is not None:
        attention.metainfo["normalization"] = normalization
    return TransformerLayerSubmodules(input_layernorm=Norm, self_attention=attention, pre_mlp_layernorm=Norm, mlp=mlp)


def get_gpt_layer_local_spec(*args: Any, **kwargs: Any) -> ModuleSpec:
    """Return the specification of a layer with ``get_gpt_layer_local_submodules(...)``."""
    return ModuleSpec(TransformerLayer, submodules=get_gpt_layer_local_submodules(*args, **kwargs))


def get_gpt_layer_with_transformer_engine_submodules(
    num_experts: int | None = None,
    moe_grouped_gemm: bool = False,
    qk_layernorm: bool = False,
    multi_latent_attention: bool = False,
    fp8: Any = None,
    qk_l2_norm: bool = False,
    use_te_op_fuser: bool = False,
    use_kitchen: bool = False,
    use_te_activation_func: bool = False,
    **unsupported: Any,
) -> TransformerLayerSubmodules:
    """Return the parts of ``get_gpt_layer_local_submodules``, where projections include the norms before them.

    Only the names of weights differ, such as ``linear_qkv.layer_norm_weight`` instead of ``input_layernorm.weight``,
    and with ``moe_grouped_gemm`` each expert has its own, ``experts.linear_fc1.weight0``. The two other ``use_te``
    switches have no effect.
    """
    unsupported |= {"qk_l2_norm": qk_l2_norm, "use_kitchen": use_kitchen}
    parts = get_gpt_layer_local_submodules(
        num_experts, qk_layernorm=qk_layernorm, multi_latent_attention=multi_latent_attention, **unsupported
    )
    return _with_transformer_engine(parts, grouped=moe_grouped_gemm)


def _with_transformer_engine(parts: TransformerLayerSubmodules, *, grouped: bool) -> TransformerLayerSubmodules:
    """Name Transformer Engine's projections, and with ``grouped`` its experts, in the specification of a layer."""
    attention = parts.self_attention.submodules
    attention.linear_proj, attention.core_attention = TERowParallelLinear, TEDotProductAttention
    if isinstance(attention, MLASelfAttentionSubmodules):
        attention.linear_q_up_proj = attention.linear_kv_up_proj = TELayerNormColumnParallelLinear
    else:
        parts.input_layernorm, attention.linear_qkv = IdentityOp, TELayerNormColumnParallelLinear
    if get_module(parts.mlp) is MLP:
        projections = MLPSubmodules(TELayerNormColumnParallelLinear, TERowParallelLinear)
        parts.pre_mlp_layernorm, parts.mlp = IdentityOp, ModuleSpec(MLP, submodules=projections)
    elif grouped:
        parts.mlp = ModuleSpec(MoELayer, submodules=MoESubmodules(experts=TEGroupedMLP))
    return parts


def get_gpt_layer_with_transformer_engine_spec(*args: Any, **kwargs: Any) -> ModuleSpec:
    """Return the specification of a layer with ``get_gpt_layer_with_transformer_engine_submodules(...)``."""
    return ModuleSpec(TransformerLayer, submodules=get_gpt_layer_with_transformer_engine_submodules(*args, **kwargs))


def get_gpt_decoder_block_spec(*args: Any, **kwargs: Any) -> TransformerBlockSubmodules:
    """Return the specification of a block with ``get_gpt_decoder_layer_specs(...)``."""
    return TransformerBlockSubmodules(layer_specs=get_gpt_decoder_layer_specs(*args, **kwargs), layer_norm=Norm)


def get_gpt_decoder_layer_specs(
    config: TransformerConfig,
    use_transformer_engine: bool,
    normalization: str | None = None,
    qk_l2_norm: bool = False,
    vp_stage: int | None = None,
    pp_rank: int | None = None,
) -> list[ModuleSpec]:
    """Return the specification of each layer of the model; ``config.moe_layer_freq`` selects layers with experts."""
    model = config.model_config()
    experts = [config.num_moe_experts if model.has_experts(i) else None for i in range(config.num_layers)]
    kind: dict[str, Any] = {"normalization": normalization, "qk_l2_norm": qk_l2_norm}
    kind |= {"qk_layernorm": config.qk_layernorm, "multi_latent_attention": config.multi_latent_attention}
    layers = [get_gpt_layer_local_submodules(number, **kind) for number in experts]
    if use_transformer_engine:
        layers = [_with_transformer_engine(parts, grouped=config.moe_grouped_gemm) for parts in layers]
    return [ModuleSpec(TransformerLayer, submodules=parts) for parts in layers]


get_gpt_layer_with_inference_spec = unsupported(
    "transformer_impl='inference_optimized' is not supported; use transformer_impl='local' for generation, too"
)


def get_gpt_mtp_block_spec(
    config: TransformerConfig,
    spec: Any,
    use_transformer_engine: bool,
    vp_stage: int | None = None,
    pp_rank: int | None = None,
) -> ModuleSpec | None:
    """Return the specification of ``config.mtp_num_layers`` layers of multi-token prediction; None without them.

    They equal the model's last layer. ``GPTModel`` builds them on its last stage.
    """
    if not config.mtp_num_layers:
        return None
    return ModuleSpec(MultiTokenPredictionBlock, submodules=MultiTokenPredictionBlockSubmodules([spec]))


def get_moe_module_spec(
    use_te: bool | None = True,
    num_experts: int | None = None,
    moe_grouped_gemm: bool | None = False,
    moe_use_legacy_grouped_gemm: bool | None = False,
) -> ModuleSpec:
    """Return the specification of a layer of experts; ``TransformerConfig`` has their number and sizes."""
    return ModuleSpec(MoELayer, submodules=MoESubmodules())


def get_moe_module_spec_for_backend(
    backend: BackendSpecProvider, num_experts: int | None = None, moe_grouped_gemm: bool | None = False, **others: Any
) -> ModuleSpec:
    """Return ``get_moe_module_spec()``; ``backend`` has no effect."""
    return get_moe_module_spec(num_experts=num_experts)


def get_gpt_heterogeneous_layer_spec(
    config: HeterogeneousTransformerConfig,
    use_te: bool = False,
    vp_stage: int | None = None,
    pp_rank: int | None = None,
) -> TransformerBlockSubmodules:
    """Return the specifications of all layers of the model; ``GPTModel`` builds those of its stage."""
    specs = []
    for block in config.per_block_parameters:
        parts = get_gpt_layer_local_submodules(qk_layernorm=config.qk_layernorm, normalization=config.normalization)
        parts = _with_transformer_engine(parts, grouped=False) if use_te else parts
        if block.attention.no_op:
            parts.input_layernorm, parts.self_attention, parts.self_attn_bda = IdentityOp, IdentityOp, IdentityFuncOp
        elif block.attention.replace_with_linear:
            parts.input_layernorm, parts.self_attention = Norm, LinearReplacement
        if block.mlp.no_op:
            parts.pre_mlp_layernorm, parts.mlp, parts.mlp_bda = IdentityOp, IdentityOp, IdentityFuncOp
        elif block.mlp.replace_with_linear:
            parts.pre_mlp_layernorm, parts.mlp = Norm, LinearReplacement
        specs.append(ModuleSpec(TransformerLayer, submodules=parts))
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=Norm)


# Programs ask for the arguments of these functions, such as vp_stage, before they pass them.
for _function, _arguments in (
    (get_gpt_layer_local_spec, get_gpt_layer_local_submodules),
    (get_gpt_layer_with_transformer_engine_spec, get_gpt_layer_with_transformer_engine_submodules),
    (get_gpt_decoder_block_spec, get_gpt_decoder_layer_specs),
):
    setattr(_function, "__signature__", signature(_arguments))  # noqa: B010
