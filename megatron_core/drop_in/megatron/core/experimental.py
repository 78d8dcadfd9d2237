"""Small functions of programs: experimental features, types, arrays, configurations as JSON, and hashes of weights."""

import functools
import hashlib
import inspect
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from megatron.core import config
from megatron.core._rank_utils import log_single_rank
from megatron_core import parallel_state
from megatron_core.output_file import make_folder, no_follow
from megatron_core.parallel.collectives import all_gather_flat_

_LOGGER = logging.getLogger("megatron.core.utils")
"""The logger that programs for Megatron configure."""


class ExperimentalNotEnabledError(Exception):
    """An experimental function was used without ``config.set_experimental_flag(True)``."""


def experimental_fn(introduced_with_version: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator of a function that raises ExperimentalNotEnabledError without the flag.

    The first call writes a line to the log. ``introduced_with_version`` is documentation.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        checked = _Check(function.__name__)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            checked()
            return function(*args, **kwargs)

        return call

    return decorate


def experimental_cls(introduced_with_version: str) -> Callable[[type], type]:
    """Return a decorator of a class that raises ExperimentalNotEnabledError without the flag.

    Creating an instance and reading an attribute of the class are checked. ``is_experimental`` is the flag.
    """

    def decorate(kind: type) -> type:
        checked, base = _Check(kind.__name__), type(kind)

        def find(own: Any, name: str) -> Any:
            if name == "is_experimental":
                return config.is_experimental_enabled()
            if not name.startswith("__"):
                checked()
            return base.__getattribute__(own, name)

        def build(own: Any, *args: Any, **kwargs: Any) -> Any:
            checked()
            return base.__call__(own, *args, **kwargs)

        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
        guard = type(kind.__name__, (base,), {"__getattribute__": find, "__call__": build} | names)
        flag = property(lambda self: config.is_experimental_enabled())
        return guard(kind.__name__, (kind,), {"is_experimental": flag} | names)

    return decorate


class _Check:
    """Raises without the flag; writes one line to the log."""

    def __init__(self, name: str) -> None:
        self._name, self._logged = name, False

    def __call__(self) -> None:
        if not config.is_experimental_enabled():
            raise ExperimentalNotEnabledError(f"{self._name} is experimental; call config.set_experimental_flag(True)")
        if not self._logged:
            self._logged = True
            log_single_rank(_LOGGER, logging.INFO, "ENABLE_EXPERIMENTAL is True, running experimental code.")


Value = TypeVar("Value")


def apply_module(m: Any, *, check_subclass: bool = True) -> Any:
    """Return the module; TypeError if it is not an ``nn.Module`` and ``check_subclass`` is set."""
    if check_subclass and not isinstance(m, nn.Module):
        raise TypeError(f"{type(m)} is not a subclass of torch.nn.Module; pass a module or check_subclass=False")
    return m


def not_none(value: Value | None) -> Value:
    """Return the value; ValueError if it is None."""
    if value is None:
        raise ValueError("Expected value to be not None; set it before this call")
    return value


def copy_signature(
    source: Callable[..., Any],
    /,
    *,
    handle_return_type: Literal["preserve", "overwrite"] = "preserve",
    handle_first_src_param: Literal["copy", "skip"] = "copy",
    handle_first_dst_param: Literal["preserve", "drop"] = "drop",
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that gives a function the signature of ``source``.

    The return type is the function's own or that of ``source`` (overwrite). The first parameter of ``source`` may be
    left out (skip), and the function's own first parameter kept (preserve), as for ``self``.
    """
    given = inspect.signature(source)

    def decorate(function: Callable[..., Any], /) -> Callable[..., Any]:
        own = inspect.signature(function)
        first = list(own.parameters.values())[: handle_first_dst_param == "preserve"]
        others = list(given.parameters.values())[handle_first_src_param == "skip" :]
        kept = own.return_annotation if handle_return_type == "preserve" else given.return_annotation
        marked: Any = function
        marked.__signature__ = own.replace(parameters=[*first, *others], return_annotation=kept)
        return function

    return decorate


Function = TypeVar("Function")


def jit_fuser(function: Function) -> Function:
    """Return ``function``: fused operations are in ``megatron_core.ops``."""
    return function


def safe_numpy_load(path: Any, *, allow_pickle: bool = False, **settings: Any) -> Any:
    """Load a ``.npy`` or ``.npz`` file; ValueError for Python objects, also with ``allow_pickle``."""
    return np.load(path, **settings)


def has_config_logger_enabled(config: Any) -> bool:
    """Whether ``config.config_logger_dir`` names a folder."""
    return bool(getattr(config, "config_logger_dir", ""))


def log_config_to_disk(config: Any, dict_data: dict[str, Any], prefix: str = "", rank_str: str = "") -> None:
    """Write ``dict_data`` to ``PREFIX.rank_RANK.json`` in that folder; values unknown to JSON as their ``repr``."""
    folder = Path(config.config_logger_dir)
    make_folder(folder)
    rank = rank_str or str(dist.get_rank() if dist.is_initialized() else 0)
    kept = {name: value for name, value in dict_data.items() if name not in ("self", "__class__")}
    with open(folder / f"{prefix}.rank_{rank}.json", "w", opener=no_follow) as file:
        file.write(json.dumps(kept, default=repr, indent=1))


def check_param_hashes_across_dp_replicas(model: list[nn.Module], cross_check: bool = False) -> bool:
    """Whether this rank's weights equal those of the first data-parallel rank; with ``cross_check`` of all ranks."""
    named = [parameter for chunk in model for parameter in chunk.parameters()]
    kinds = {True: parallel_state.get_data_parallel_group, False: parallel_state.get_expert_data_parallel_group}
    same = True
    for dense, group in kinds.items():
        own = [_digest(parameter) for parameter in named if getattr(parameter, "allreduce", True) is dense]
        if own:
            found = _gathered(torch.stack(own), group())
            same &= bool((found == found[:1]).all() if cross_check else (found[0] == torch.stack(own)).all())
    return same


def _digest(parameter: Any) -> torch.Tensor:
    """SHA-1 of the values in float32, 20 bytes."""
    values = parameter.detach().float().cpu().contiguous().numpy().tobytes()
    return torch.tensor(list(hashlib.sha1(values, usedforsecurity=False).digest()), dtype=torch.uint8)


def _gathered(own: torch.Tensor, group: Any) -> torch.Tensor:
    """Return the tensors of all ranks of a group, stacked."""
    if group.size() == 1:
        return own[None]
    found = own.new_empty(group.size() * own.numel())
    all_gather_flat_(found, own.reshape(-1), group)
    return found.view(group.size(), *own.shape)
