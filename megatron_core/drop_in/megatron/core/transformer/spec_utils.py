"""Specifications of modules as data, and modules for their places: without effect, and torch's norms."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module as import_path
from types import FunctionType
from typing import Any

import torch
from torch import nn

from megatron_core.errors import ConfigError


@dataclass
class ModuleSpec:
    """A module's constructor, its keyword arguments, and the specifications of its parts.

    The constructor is a class, a function, or a pair (module path, name). Calling a specification builds the module.
    """

    module: tuple[str, str] | type | Callable[..., Any]
    params: dict[str, Any] = field(default_factory=dict)
    submodules: Any = None
    metainfo: dict[str, Any] = field(default_factory=dict)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call ``build_module`` with this specification."""
        return build_module(self, *args, **kwargs)


def import_module(module_path: tuple[str, str]) -> Any:
    """Return the object of a pair (module path, name); ImportError if it does not exist."""
    path, name = module_path
    try:
        module = import_path(path)
    except ImportError as error:
        raise ImportError(f"Could not import module '{path}': {error}") from error
    if not hasattr(module, name):
        raise ImportError(f"Could not find spec '{name}' in module '{path}'")
    return getattr(module, name)


def get_module(spec_or_module: Any, **additional_kwargs: Any) -> Any:
    """Return the class or function of a specification, imported if it is given by path."""
    module = spec_or_module.module if isinstance(spec_or_module, ModuleSpec) else spec_or_module
    return import_module(module) if isinstance(module, tuple) else module


def get_submodules(spec: Any) -> Any:
    """Return the parts in a specification, or in a ``functools.partial`` with ``submodules=``."""
    if isinstance(spec, ModuleSpec):
        return spec.submodules
    if isinstance(spec, partial):
        return spec.keywords["submodules"]
    raise ConfigError(f"{spec!r} has no submodules; pass a ModuleSpec or a functools.partial")


def build_module(spec_or_module: Any, *args: Any, **kwargs: Any) -> Any:
    """Return an instance of the class with the arguments of the specification and these; return a function as it is.

    Raises TypeError with the name of the class for arguments that it does not accept.
    """
    spec = spec_or_module if isinstance(spec_or_module, ModuleSpec) else ModuleSpec(spec_or_module)
    module = get_module(spec)
    if isinstance(module, FunctionType):
        return module
    if spec.submodules is not None:
        kwargs["submodules"] = spec.submodules
    try:
        return module(*args, **spec.params, **kwargs)
    except TypeError as error:
        raise TypeError(f"{error} when instantiating {getattr(module, '__name__', module)}") from error


class IdentityOp(torch.nn.Module):
    """x -> x; other arguments have no effect."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the first argument."""
        return x


class IdentityFuncOp(IdentityOp):
    """() -> IdentityOp's forward, for places that need a function that returns a function."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return a function that returns its first argument."""
        return super().forward


class WrappedTorchNorm:
    """LayerNorm or RMSNorm of torch, as selected by ``config.normalization``.

    In a layer's specification it selects the engine's norm.
    """

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **others: Any) -> nn.Module:  # type: ignore[misc]
        """Return the module in ``config.params_dtype``; other arguments have no effect."""
        kind = nn.RMSNorm if config.normalization == "RMSNorm" else nn.LayerNorm
        return kind(hidden_size, eps=eps, dtype=config.params_dtype)


class L2Norm(nn.Module):
    """x / sqrt(mean(x^2) + eps), without weights."""

    def __init__(self, hidden_size: int, eps: float = 1e-6, **others: Any) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden_size, eps=eps, elementwise_affine=False)

    def forward(self, x: Any) -> Any:
        """``[..., h]`` -> the same shape."""
        return self.norm(x)
