"""GPT models: ``model`` has this package's own; ``GPTModel`` here is the class with Megatron Core's arguments."""

from typing import TYPE_CHECKING

from megatron_core.lazy import lazy_names

if TYPE_CHECKING:
    from megatron_core.models.gpt.gpt_model import GPTModel

__getattr__ = lazy_names(__name__, __file__)
