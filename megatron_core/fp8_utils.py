"""For Megatron Core's users: what layers in FP8 are built and run in; here that is a part of the layers themselves."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from megatron_core.errors import ConfigError


def get_fp8_context(config: Any, layer_no: int = -1, is_init: bool = False) -> AbstractContextManager[None]:
    """A context that changes nothing. ConfigError where ``config.fp8`` asks for FP8 (``--fp8-format`` of
    ``pretrain_gpt.py`` has it)."""
    if config.fp8:
        raise ConfigError(f"fp8={config.fp8!r} is not supported by models of a TransformerConfig; leave it out")
    return nullcontext()


def is_float8tensor(tensor: Tensor) -> bool:
    """False: weights are never stored in Transformer Engine's FP8 tensors."""
    return False
