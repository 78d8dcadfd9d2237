"""GPT models: ``model`` has this package's own; ``GPTModel`` here is the class with Megatron Core's arguments."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_core.models.gpt.gpt_model import GPTModel

__all__ = ["GPTModel"]

_HOMES = {"gpt_model": ("GPTModel",)}


def __getattr__(name: str) -> object:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
