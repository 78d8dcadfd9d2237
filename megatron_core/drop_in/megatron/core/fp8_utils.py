"""The context of layers in FP8, which is a part of the engine's layers."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor


def get_fp8_context(config: Any, layer_no: int = -1, is_init: bool = False) -> AbstractContextManager[None]:
    """Return a context without effect: layers that ``config.fp8`` selects always use FP8."""
    return nullcontext()


def is_float8tensor(tensor: Tensor) -> bool:
    """Return False: weights are never stored in Transformer Engine's FP8 tensors."""
    return False


is_mxfp8tensor = is_float8tensor
