"""Vision models, which are not supported."""

from megatron.core.transformer.module import MegatronModule
from megatron_core.drop_in.unsupported import Unsupported


class VisionModule(Unsupported, MegatronModule):
    """Stands for Megatron's class; building it raises ConfigError."""

    message = "vision models are not supported; use GPTModel for text"
