"""The context of layers in FP8, which is a part of the engine's layers."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any


def get_fp8_context(config: Any, layer_no: int = -1, is_init: bool = False) -> AbstractContextManager[None]:
    """Return a context without effect: layers that ``config.fp8`` selects always use FP8."""
    return nullcontext()
