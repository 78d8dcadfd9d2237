"""``module.zero_grad()`` of a module that an engine trains, whose gradients are not in ``parameter.grad``."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any, cast

from torch import nn


class ZeroGrad:
    """Replaces ``zero_grad`` of one module; copies of the module, which no engine trains, have the method itself."""

    def __init__(self, module: nn.Module, discard: Callable[[], object]) -> None:
        self._module = module
        self._discard = discard

    def __call__(self, set_to_none: bool = True) -> None:
        """Call the module's own method, and discard the gradients of the engine."""
        type(self._module).zero_grad(self._module, set_to_none)
        self._discard()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo[id(self._module)]
        return MethodType(type(copied).zero_grad, copied)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._module, "zero_grad")


def discard_with(module: nn.Module, discard: Callable[[], object]) -> None:
    """Let ``module.zero_grad()`` call ``discard()``, too."""
    cast(Any, module).zero_grad = ZeroGrad(module, discard)
