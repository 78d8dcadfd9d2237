"""Kinds of models and layers."""

from enum import Enum


class ModelType(Enum):
    """What a model consists of; models here have one stack of layers."""

    encoder_or_decoder = 1


class LayerType(Enum):
    """What may stand on a stage, with Megatron's names and numbers."""

    embedding = 1
    loss = 2
    encoder = 3
    decoder = 4
    mtp = 5


class Fp8Recipe(Enum):
    """How factors of FP8 are found; ``--fp8-recipe`` names those that there are here."""

    delayed = "delayed"
    tensorwise = "tensorwise"
    mxfp8 = "mxfp8"
    blockwise = "blockwise"
    custom = "custom"
