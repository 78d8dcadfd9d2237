"""Attributes of nested modules by dotted name."""

from operator import attrgetter
from typing import Any


def recursive_getattr(model: Any, module_name: str) -> Any:
    """Return the attribute ``module_name`` of ``model``, such as ``layers.0.weight``."""
    return attrgetter(module_name)(model)


def recursive_setattr(model: Any, module_name: str, module: Any) -> None:
    """Set the attribute ``module_name`` of ``model`` to ``module``."""
    above, _, own = module_name.rpartition(".")
    setattr(attrgetter(above)(model) if above else model, own, module)
