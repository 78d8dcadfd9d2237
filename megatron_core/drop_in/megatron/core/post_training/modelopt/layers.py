"""Layers of ModelOpt, which are not supported."""

from megatron.core.unsupported import Unsupported


class Linear(Unsupported):
    """Stands for Megatron's class; building it raises ConfigError."""

    message = "ModelOpt's Linear is not supported; use TELinear of extensions.transformer_engine"
