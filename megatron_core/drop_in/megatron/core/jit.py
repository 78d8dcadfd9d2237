"""The decorator of functions that Megatron compiles; they run as they are here."""

from __future__ import annotations

from typing import TypeVar

Function = TypeVar("Function")


def jit_fuser(function: Function) -> Function:
    """``function`` itself: fused operations are in ``ops``, for ``torch.compile`` a caller says so."""
    return function
