"""Megatron-LM's models before ``megatron.core``, which are not supported."""

from typing import Any

from torch import nn

from megatron_core.errors import ConfigError


class GPTModel(nn.Module):
    """A class for annotations; building it raises ConfigError."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise ConfigError("use_legacy_models=True is not supported; use megatron.core.models.gpt.GPTModel")
