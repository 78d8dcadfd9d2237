"""Specifications of the layers of a model whose layers differ in their sizes."""

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
from megatron.core.transformer.heterogeneous.heterogeneous_config import HeterogeneousTransformerConfig
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.layer_context import TransformerBlockSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron_core.transformer import Norm
from megatron_core.transformer.linear_replacement import LinearReplacement


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
        if block.attention.no_op:
            parts.input_layernorm, parts.self_attention, parts.self_attn_bda = IdentityOp, IdentityOp, IdentityFuncOp
        elif block.attention.replace_with_linear:
            parts.self_attention = LinearReplacement
        if block.mlp.no_op:
            parts.pre_mlp_layernorm, parts.mlp, parts.mlp_bda = IdentityOp, IdentityOp, IdentityFuncOp
        elif block.mlp.replace_with_linear:
            parts.mlp = LinearReplacement
        specs.append(ModuleSpec(TransformerLayer, submodules=parts))
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=Norm)
