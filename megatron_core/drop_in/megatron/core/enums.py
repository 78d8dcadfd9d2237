"""Kinds of models and layers."""

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
