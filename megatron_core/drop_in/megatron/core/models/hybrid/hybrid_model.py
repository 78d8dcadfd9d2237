"""Models of attention and state-space layers, which are not supported."""

from typing import Any

from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron_core.errors import ConfigError


class HybridModel(LanguageModule):
    """A class for annotations and ``isinstance``; building it raises ConfigError."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise ConfigError(f"{type(self).__name__} is not supported: there are no state-space layers; use GPTModel")
