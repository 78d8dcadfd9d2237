"""Kinds of models, layers, masks, attention and backends."""

from enum import Enum


class ModelType(Enum):
    """The structure of a model; models here have one stack of layers."""

    encoder_or_decoder = 1


class LayerType(Enum):
    """The kinds of layers on a stage, with Megatron's names and numbers."""

    embedding = 1
    loss = 2
    encoder = 3
    decoder = 4
    mtp = 5


class Fp8Recipe(Enum):
    """Megatron's recipes of FP8; ``--fp8-recipe`` lists the supported ones."""

    delayed = "delayed"
    tensorwise = "tensorwise"
    mxfp8 = "mxfp8"
    blockwise = "blockwise"
    custom = "custom"


class AttnType(Enum):
    """The source of the keys."""

    self_attn = 1
    cross_attn = 2


class AttnMaskType(Enum):
    """The keys that a query must not see."""

    padding = 1
    causal = 2
    no_mask = 3
    padding_causal = 4
    arbitrary = 5
    causal_bottom_right = 6


class AttnBackend(Enum):
    """The implementation of attention: torch, or plain products and a softmax for ``unfused`` and ``local``."""

    flash = 1
    fused = 2
    unfused = 3
    local = 4
    auto = 5


class CudaGraphModule(Enum):
    """The modules of a layer that a CUDA graph captures."""

    attn = 1
    mlp = 2
    moe = 3
    moe_router = 4
    moe_preprocess = 5
    mamba = 6


class CudaGraphScope(Enum):
    """Scopes of CUDA graphs up to release 0.17."""

    full_iteration = 1
    attn = 2
    mlp = 3
    moe = 4
    moe_router = 5
    moe_preprocess = 6
    mamba = 7
    full_iteration_inference = 8


class InferenceCudaGraphScope(Enum):
    """Scopes of CUDA graphs in generation."""

    none = 1
    layer = 2
    block = 3
