"""Objects from configurations: a dictionary's ``_target_`` names what to call with the other entries."""

import functools
import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

from megatron.training.config.allowlist import TargetAllowlist, locate

try:
    from omegaconf import OmegaConf  # type: ignore[import-not-found]  # an optional package

    HAVE_OMEGACONF = True
except ImportError:
    HAVE_OMEGACONF = False

target_allowlist = TargetAllowlist()
_locate = locate


class InstantiationException(Exception):
    """A configuration names something unknown or not allowed, or the call failed."""


class InstantiationMode(Enum):
    """Whether entries that the target does not take are errors or are left out with a warning."""

    STRICT = "strict"
    LENIENT = "lenient"


class _Keys(str, Enum):
    """Entries with a meaning of their own."""

    TARGET = "_target_"
    PARTIAL = "_partial_"
    CALL = "_call_"
    ARGS = "_args_"
    NAME = "_name_"


_OWN = {_Keys.TARGET.value, _Keys.PARTIAL.value, _Keys.CALL.value, _Keys.NAME.value}
_MISSING = "???"
"""OmegaConf's value of an entry that must be set later."""


def instantiate(config: Any, *args: Any, mode: InstantiationMode = InstantiationMode.LENIENT, **kwargs: Any) -> Any:
    """Return the object that a configuration describes; None for None.

    ``config`` is a dictionary, a list, a dataclass, or a configuration of OmegaConf. Entries of a dictionary with
    ``_target_`` are keyword arguments of the target; inner dictionaries are instantiated first. ``_args_`` has
    positional arguments, ``_partial_`` returns ``functools.partial``, and ``_call_: false`` the target itself. ``args``
    replaces ``_args_``, and ``kwargs`` entries. Raises InstantiationException and, for a wrong ``_partial_``,
    TypeError.
    """
    if config is None:
        return None
    if not _is_config(config):
        raise InstantiationException(
            f"Cannot instantiate config of type {type(config).__name__}; pass a dict, a list or a dataclass"
        )
    node = _plain(config)
    if isinstance(node, list):
        if kwargs.get(_Keys.PARTIAL, False):
            raise InstantiationException("The _partial_ keyword is not compatible with a list; set it in its items")
        return instantiate_node(node, mode=mode)
    return instantiate_node(_merge(node, _prepare_input_dict_or_list(kwargs)), *args, mode=mode)


def instantiate_node(
    node: Any, *args: Any, partial: bool = False, mode: InstantiationMode = InstantiationMode.LENIENT
) -> Any:
    """Return the object that one node of a configuration describes; values without ``_target_`` are kept."""
    return _instantiate(_convert_node(node), "", args, partial, mode)


def _instantiate(node: Any, where: str, args: Sequence[Any], partial: bool, mode: InstantiationMode) -> Any:
    inner = functools.partial(_instantiate, args=(), partial=False, mode=mode)
    if isinstance(node, list):
        return [inner(value, f"{where}[{index}]") for index, value in enumerate(node)]
    if not isinstance(node, dict):
        return node
    partial = node.get(_Keys.PARTIAL, partial)
    if not isinstance(partial, bool):
        raise TypeError(_at(f"_partial_ flag must be a bool, got {partial!r}", where))
    below = {
        key: value for key, value in node.items() if not (partial and isinstance(value, str) and value == _MISSING)
    }
    if not _is_target(node):
        return {key: inner(value, _join(where, key)) for key, value in below.items()}
    called = node.get(_Keys.CALL, True)
    target: Any = resolve_target(node[_Keys.TARGET], where, check_callable=called)
    if not called:
        if extra := sorted(set(node) - {_Keys.TARGET.value, _Keys.CALL.value}):
            text = f"_call_ was set to False for {_convert_target_to_string(target)}, so remove its entries {extra}"
            raise InstantiationException(_at(text, where))
        return target
    given = {key: inner(value, _join(where, key)) for key, value in below.items() if key not in _OWN}
    return _call_target(target, partial, tuple(args), _filter_kwargs_for_target(target, given, where, mode), where)


def resolve_target(target: Any, full_key: str, check_callable: bool = True) -> Any:
    """Return what ``target`` names if the allow-list contains it; other objects are returned."""
    if isinstance(target, str):
        if not target_allowlist.is_allowed(target):
            prefixes, exact = target_allowlist.allowed_prefixes, sorted(target_allowlist.allowed_exact)
            text = (
                f"_target_ {target!r} is not in the allowlist, which has names of {', '.join(prefixes)} and "
                f"{', '.join(exact)}, without functions that load files or run commands. If you trust it, call "
                f"target_allowlist.add_exact({target!r}) or target_allowlist.add_prefix(...)"
            )
            raise InstantiationException(_at(text, full_key))
        name = target
        try:
            target = locate(name)
            target_allowlist.check_origin(name, target)
        except Exception as error:
            raise InstantiationException(_at(f"Error locating target {name!r}: {error}", full_key)) from error
    if check_callable and not callable(target):
        text = f"Expected a callable target, got {target!r} of type {type(target).__name__}"
        raise InstantiationException(_at(text, full_key))
    return target


_resolve_target = resolve_target


def _call_target(target: Callable[..., Any], partial: bool, args: Any, kwargs: dict[str, Any], full_key: str) -> Any:
    args, kwargs = _extract_pos_args(args, kwargs)
    try:
        return functools.partial(target, *args, **kwargs) if partial else target(*args, **kwargs)
    except Exception as error:
        name, action = _convert_target_to_string(target), "creating partial of" if partial else "call to target"
        raise InstantiationException(_at(f"Error in {action} {name!r}: {error!r}", full_key)) from error


def _extract_pos_args(input_args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return positional arguments, of which ``input_args`` have precedence over ``_args_``, and the other entries."""
    listed = kwargs.get(_Keys.ARGS, ())
    if not isinstance(listed, Sequence):
        raise InstantiationException(f"Unsupported _args_ type: {type(listed).__name__}; give a list, not {listed!r}")
    return input_args or listed, {key: value for key, value in kwargs.items() if key != _Keys.ARGS}


def _filter_kwargs_for_target(
    target: Callable[..., Any], kwargs: dict[str, Any], full_key: str, mode: InstantiationMode
) -> dict[str, Any]:
    """Return the entries that ``target`` takes; other entries raise InstantiationException if ``mode`` is STRICT."""
    try:
        parameters = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):  # some built-in functions have no signature
        return kwargs
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return kwargs
    taken = {each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
    extra = sorted(set(kwargs) - taken - {_Keys.ARGS.value})
    if not extra:
        return kwargs
    name = _convert_target_to_string(target)
    if mode is InstantiationMode.STRICT:
        raise InstantiationException(_at(f"Unexpected config keys for target {name!r}: {extra}", full_key))
    logging.getLogger(__name__).warning(_at(f"Dropping unexpected config keys for target {name!r}: {extra}", full_key))
    return {key: value for key, value in kwargs.items() if key not in extra}


def _is_config(value: Any) -> bool:
    structured = is_dataclass(value) and not isinstance(value, type)
    return isinstance(value, dict | list) or structured or (HAVE_OMEGACONF and OmegaConf.is_config(value))


def _plain(config: Any) -> Any:
    """Return dictionaries and lists with names of targets; OmegaConf resolves references such as ``${size}``."""
    if HAVE_OMEGACONF and OmegaConf.is_config(config):
        return _convert_node(config)
    if is_dataclass(config):
        config = {each.name: getattr(config, each.name) for each in fields(config)}
    config = _prepare_input_dict_or_list(config)
    if not _has_references(config):
        return config
    if not HAVE_OMEGACONF:
        raise ImportError("the configuration has references such as ${name}; pip install omegaconf resolves them")
    return _convert_node(OmegaConf.create(config, flags={"allow_objects": True}))


def _has_references(node: Any) -> bool:
    if isinstance(node, dict | list):
        return any(_has_references(each) for each in (node.values() if isinstance(node, dict) else node))
    return isinstance(node, str) and "${" in node


def _merge(node: dict[Any, Any], changes: dict[Any, Any]) -> dict[Any, Any]:
    """Return ``node`` with ``changes``; inner dictionaries are merged, too."""
    merged = dict(node)
    for key, value in changes.items():
        both = isinstance(value, dict) and isinstance(node.get(key), dict)
        merged[key] = _merge(node[key], value) if both else value
    return merged


def _prepare_input_dict_or_list(given: Any) -> Any:
    """Return a copy in which each ``_target_`` is a name."""
    if isinstance(given, dict):
        names = {
            key: _convert_target_to_string(value) if key == _Keys.TARGET else value for key, value in given.items()
        }
        return {k: _prepare_input_dict_or_list(v) if isinstance(v, dict | list) else v for k, v in names.items()}
    if isinstance(given, list):
        return [_prepare_input_dict_or_list(each) if isinstance(each, dict | list) else each for each in given]
    raise InstantiationException(f"Expected a dict or list, got {type(given).__name__}")


def _convert_target_to_string(target: Any) -> Any:
    return f"{target.__module__}.{target.__qualname__}" if callable(target) else target


def _convert_node(node: Any) -> Any:
    """Return a configuration of OmegaConf as dictionaries and lists; anything else unchanged."""
    if HAVE_OMEGACONF and OmegaConf.is_config(node):
        return OmegaConf.to_container(node, resolve=True)
    return node


def _is_target(value: Any) -> bool:
    return _Keys.TARGET in value if isinstance(value, dict) or _is_omegaconf_dict(value) else False


def _is_omegaconf_dict(value: Any) -> bool:
    return HAVE_OMEGACONF and bool(OmegaConf.is_dict(value))


def _join(where: str, key: Any) -> str:
    return f"{where}.{key}" if where else str(key)


def _at(text: str, full_key: str) -> str:
    return f"{text}\nfull_key: {full_key}" if full_key else text
