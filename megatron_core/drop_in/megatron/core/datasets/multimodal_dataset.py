"""Data of images, which are not supported."""

from megatron.core.unsupported import Unsupported

_MESSAGE = "models of images are not supported; use GPTModel for text"


class MockMultimodalDataset(Unsupported):
    """Stands for Megatron's class; building it raises ConfigError."""

    message = _MESSAGE


class MultimodalDatasetConfig(Unsupported):
    """Stands for Megatron's class; building it raises ConfigError."""

    message = _MESSAGE
