"""Kinds of models, layers, masks, attention and backends."""

from enum import Enum

ModelType = Enum("ModelType", "encoder_or_decoder encoder_and_decoder")  # mbridge compares with the second
"""The structure of a model; models here have one stack of layers."""
LayerType = Enum("LayerType", "embedding loss encoder decoder mtp")
"""The kinds of layers on a stage, with Megatron's names and numbers."""
_RECIPES = ("delayed", "tensorwise", "mxfp8", "blockwise", "custom")
Fp8Recipe = Enum("Fp8Recipe", [(name, name) for name in _RECIPES], type=str)  # type: ignore[misc]
"""Megatron's recipes of FP8; ``--fp8-recipe`` lists the supported ones."""
AttnType = Enum("AttnType", "self_attn cross_attn")
"""The source of the keys."""
AttnMaskType = Enum("AttnMaskType", "padding causal no_mask padding_causal arbitrary causal_bottom_right")
"""The keys that a query must not see."""
AttnBackend = Enum("AttnBackend", "flash fused unfused local auto")
"""The implementation of attention: torch, or plain products and a softmax for ``unfused`` and ``local``."""
CudaGraphModule = Enum("CudaGraphModule", "attn mlp moe moe_router moe_preprocess mamba")
"""The modules of a layer that a CUDA graph captures."""
CudaGraphScope = Enum(
    "CudaGraphScope", "full_iteration attn mlp moe moe_router moe_preprocess mamba full_iteration_inference"
)
"""Scopes of CUDA graphs up to release 0.17."""
InferenceCudaGraphScope = Enum("InferenceCudaGraphScope", "none layer block")
"""Scopes of CUDA graphs in generation."""
