"""Checks of the arguments of ``initialize`` and ``parallelize``, which do not depend on the number of ranks."""

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.data import IterableDataset

from megatron_core.any_model.partition import check_partition_method
from megatron_core.errors import CheckpointError, ConfigError
from megatron_core.parallel.texts import listed

NUMBERS = ("lr", "weight_decay", "eps", "momentum")
"""Settings of a parameter group that are a number >= 0."""
DEFAULT_PARTITION = "parameters"


def check_model(model: Any) -> None:
    """ConfigError unless ``model`` is a module whose parameters have their shapes."""
    if not isinstance(model, nn.Module):
        hint = "call it to construct the model" if callable(model) else "construct the model first"
        raise ConfigError(f"model={_shown(model)} must be a torch.nn.Module; {hint}")
    lazy = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if is_lazy(tensor)]
    if lazy:
        raise ConfigError(
            f"model={type(model).__name__}: {listed(lazy)} {'has' if len(lazy) == 1 else 'have'} no shape before the "
            "first forward of a lazy module; run the model on a batch first"
        )


def check_positive(**counts: Any) -> None:
    """ConfigError for an argument that is not an integer >= 1."""
    for name, count in counts.items():
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ConfigError(f"{name}={_shown(count)} must be an integer >= 1")


def check_flags(**flags: Any) -> None:
    """ConfigError for an argument that is neither True nor False."""
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise ConfigError(f"{name}={_shown(flag)} must be True or False")


def check_functions(**functions: Any) -> None:
    """ConfigError for an argument that is neither None nor a function."""
    for name, function in functions.items():
        if function is not None and not callable(function):
            raise ConfigError(f"{name}={_shown(function)} must be a function, or None")


def check_dataset(dataset: Any) -> None:
    """ConfigError unless ``dataset`` has a length and entries by position."""
    if isinstance(dataset, IterableDataset):
        raise ConfigError(
            "training_data is an IterableDataset, which has no positions to resume at; give a data set with "
            "__len__ and __getitem__, or pass the batches of your own loader to the engine"
        )
    if isinstance(dataset, str | bytes | type) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise ConfigError(
            f"training_data={_shown(dataset)} must be a data set with __len__ and __getitem__; pass the batches of an "
            "iterator or of your own loader to the engine"
        )


def next_batch(batches: Any) -> Any:
    """Return the next micro-batch.

    Errors: ``ConfigError`` for a list or a loader, of which each step would read the first batches.
    """
    check_batches(batches)
    return next(batches)


def check_batches(batches: Any) -> None:
    """ConfigError unless ``batches`` is an iterator."""
    if not hasattr(batches, "__next__"):
        raise ConfigError(f"batches={_shown(batches)} must be an iterator of micro-batches, such as iter(loader)")


def folder_name(folder: Any) -> str:
    """Return the path of a folder; ``CheckpointError`` if it is neither a text nor a path."""
    if not isinstance(folder, str | os.PathLike) or not os.fspath(folder):
        raise CheckpointError(f"folder={_shown(folder)} must be the path of a folder of checkpoints")
    return os.fspath(folder)


def make_optimizer(optimizer: Any, parameters: Iterable[Any]) -> torch.optim.Optimizer:
    """Return ``optimizer``, or the result of ``optimizer(parameters)`` if it is a function or a class.

    Errors: ``ConfigError`` if neither is an optimizer of torch.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    if not callable(optimizer):
        raise ConfigError(
            f"optimizer={_shown(optimizer)} must be a torch optimizer, or a function that makes one of a list of "
            "parameters; the name of an optimizer is a setting of config"
        )
    result = optimizer(parameters)
    if not isinstance(result, torch.optim.Optimizer):
        raise ConfigError(
            f"optimizer={_shown(optimizer)} returned {_shown(result)}, not a torch optimizer; let the function return "
            "the optimizer that it makes"
        )
    return result


def checked_groups(model_parameters: Iterable[Any] | None) -> list[Any] | None:
    """Return ``model_parameters`` as a list; ``ConfigError`` unless it has parameters, or groups of them."""
    if model_parameters is None:
        return None
    if isinstance(model_parameters, torch.Tensor | str | Mapping) or not isinstance(model_parameters, Iterable):
        raise ConfigError(
            f"model_parameters={_shown(model_parameters)} must be a list of parameters, or of groups with 'params'"
        )
    items = list(model_parameters)
    if not items:
        raise ConfigError("model_parameters has no entries; an iterator such as model.parameters() can be read once")
    for number, item in enumerate(items):
        if isinstance(item, Mapping):
            items[number] = _checked_group(f"group {number} of model_parameters", item)
        elif not _is_parameter(item):
            raise ConfigError(f"model_parameters has {_shown(item)}; legal: parameters, and dicts with 'params'")
    return items


def _checked_group(name: str, group: Mapping[Any, Any]) -> dict[Any, Any]:
    if "params" not in group:
        raise ConfigError(f"{name} has no 'params', but {listed(list(group)) or 'nothing'}; add its parameters")
    params = group["params"]
    if isinstance(params, str | Mapping | set) or not isinstance(params, Iterable):
        raise ConfigError(f"{name}: params={_shown(params)} must be a list of parameters")
    members = [params] if isinstance(params, torch.Tensor) else list(params)
    wrong = next((member for member in members if not _is_parameter(member)), None)
    if wrong is not None:
        raise ConfigError(f"{name}: params has {_shown(wrong)}; legal: parameters")
    for key in NUMBERS:
        if key in group and not is_number(group[key]):
            raise ConfigError(f"{name}: {key}={_shown(group[key])} must be a number >= 0")
    betas = group.get("betas", (0.0, 0.0))
    if not isinstance(betas, tuple | list) or len(betas) != 2 or not all(is_number(b) and b < 1 for b in betas):
        raise ConfigError(f"{name}: betas={_shown(betas)} must be two numbers >= 0 and < 1")
    return {**group, "params": members}


def _is_parameter(value: Any) -> bool:
    """Whether ``value`` is a tensor, or a pair of a name and a tensor as in ``named_parameters()``."""
    is_named = isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str)
    return isinstance(value[1] if is_named else value, torch.Tensor)


def is_number(value: Any) -> bool:
    """Whether ``value`` is a finite number >= 0, or a tensor with one."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_complex() and 0 <= float(value) < math.inf
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


def check_unit_classes(model: nn.Module, unit_classes: Any, *, is_built: bool) -> None:
    """ConfigError unless ``unit_classes`` are names and types of modules of ``model``, if it ``is_built``."""
    if unit_classes is None:
        return
    is_list = isinstance(unit_classes, Sequence | set) and not isinstance(unit_classes, str)
    if not is_list or not unit_classes or not all(isinstance(wanted, str | type) for wanted in unit_classes):
        raise ConfigError(
            f"unit_classes={_shown(unit_classes)} must be a list of names or types of modules, such as ['Block']"
        )
    modules = list(model.modules())
    for wanted in unit_classes if is_built else ():
        known = (type(m).__name__ == wanted if isinstance(wanted, str) else isinstance(m, wanted) for m in modules)
        if not any(known):
            names = list(dict.fromkeys(type(module).__name__ for module in modules))
            raise ConfigError(
                f"unit_classes={[getattr(c, '__name__', c) for c in unit_classes]}: the model has no such modules as "
                f"{getattr(wanted, '__name__', wanted)}; its classes are {listed(names)}"
            )


def check_cut(model: nn.Module, partition_method: Any, head_modules: Any, *, is_list_of_layers: bool) -> None:
    """ConfigError unless the arguments could cut ``model`` into pipeline stages.

    A ``PipelineModule`` (``is_list_of_layers``) has a division of its own.
    """
    if is_list_of_layers and (partition_method != DEFAULT_PARTITION or head_modules):
        raise ConfigError(
            "partition_method and head_modules of initialize have no effect on a PipelineModule; give partition_method "
            "to its constructor"
        )
    named = list(model.named_modules())
    check_partition_method(partition_method, [type(module).__name__ for _, module in named], has_example=False)
    if isinstance(head_modules, str) or not isinstance(head_modules, Sequence):
        raise ConfigError(f"head_modules={_shown(head_modules)} must be a list of names of modules")
    unknown = [name for name in head_modules if name not in dict(named)]
    if unknown:
        raise ConfigError(
            f"head_modules={unknown}: {type(model).__name__} has no such modules; its modules are "
            f"{listed([name for name, _ in named if name])}"
        )


def check_scheduler_of(scheduler: Any, optimizer: torch.optim.Optimizer) -> None:
    """ConfigError if a torch scheduler, or one inside of it, changes the rates of another optimizer."""
    inner = getattr(scheduler, "_schedulers", ())
    for inner_scheduler in (scheduler, *(inner if isinstance(inner, list | tuple) else ())):
        target = getattr(inner_scheduler, "optimizer", None)
        groups = getattr(target, "param_groups", None)
        if groups is not None and groups is not optimizer.param_groups:
            raise ConfigError(
                f"lr_scheduler={type(inner_scheduler).__name__} changes the learning rates of another optimizer "
                f"({type(target).__name__}), so it would have no effect; construct it with the optimizer that is given "
                "to initialize, or give a function that makes it of the engine's optimizer"
            )


def scheduler_made_by(function: Callable[..., Any], optimizer: torch.optim.Optimizer) -> Any:
    """Return the scheduler ``function(optimizer)``; ``ConfigError`` if the result is none."""
    scheduler = function(optimizer)
    if not callable(getattr(scheduler, "step", None)):
        raise ConfigError(
            f"lr_scheduler={_shown(function)} returned {_shown(scheduler)}, which has no step(); let the function "
            "return the scheduler that it makes"
        )
    return scheduler


def _shown(value: Any) -> str:
    """Return a short text for any value of a wrong type."""
    if isinstance(value, type) or (callable(value) and hasattr(value, "__name__")):
        return f"{type(value).__name__} {value.__name__}"
    if value is None or isinstance(value, bool | int | float | str | bytes | list | tuple | dict | set):
        text = " ".join(repr(value).split())
        return text if len(text) <= 80 else f"{text[:80]}..."
    return f"a {type(value).__name__}"
