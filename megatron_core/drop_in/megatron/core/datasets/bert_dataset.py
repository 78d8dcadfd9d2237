"""BERT, which is not supported."""

from megatron.core.unsupported import Unsupported

_MESSAGE = "BERT is not supported; use GPTModel"


class BERTMaskedWordPieceDataset(Unsupported):
    """Stands for Megatron's class; building it raises ConfigError."""

    message = _MESSAGE


class BERTMaskedWordPieceDatasetConfig(Unsupported):
    """Stands for Megatron's class; building it raises ConfigError."""

    message = _MESSAGE
