"""T5, which is not supported."""

from megatron.core.unsupported import Unsupported

_MESSAGE = "T5 is not supported; use GPTModel"


class T5MaskedWordPieceDataset(Unsupported):
    """Stands for Megatron's class; building it raises ConfigError."""

    message = _MESSAGE


class T5MaskedWordPieceDatasetConfig(Unsupported):
    """Stands for Megatron's class; building it raises ConfigError."""

    message = _MESSAGE
