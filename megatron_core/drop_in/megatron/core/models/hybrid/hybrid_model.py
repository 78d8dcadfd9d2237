"""Models of attention and state-space layers, which are not supported."""

from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.unsupported import Unsupported


class HybridModel(Unsupported, LanguageModule):
    """A model with state-space layers."""

    message = "HybridModel is not supported: there are no state-space layers; use GPTModel"
