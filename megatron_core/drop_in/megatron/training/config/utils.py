"""Compatibility of saved configurations with newer classes."""

import logging
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

from megatron.training.config.instantiate_utils import InstantiationException, resolve_target

logger = logging.getLogger(__name__)


def sanitize_dataclass_config(config: Any) -> Any:
    """Return a copy of a configuration without values of fields that its classes compute (``init=False``).

    ``config`` is a dictionary whose ``_target_`` names a dataclass, with such dictionaries inside. Anything that is not
    a dictionary, and fields of classes that cannot be resolved, remain unchanged.
    """
    if isinstance(config, list):
        return [sanitize_dataclass_config(each) for each in config]
    if not isinstance(config, dict):
        return config
    target = config.get("_target_")
    kind = _resolve_target_class(target) if isinstance(target, str) else None
    computed = frozenset[str]() if kind is None else _get_init_false_fields(kind)
    return {name: sanitize_dataclass_config(value) for name, value in config.items() if name not in computed}


def _resolve_target_class(target: str) -> Any:
    """Return what an allowed ``_target_`` names; None if it is not allowed or does not exist."""
    try:
        return resolve_target(target, "", check_callable=False)
    except InstantiationException as error:
        logger.warning("_target_ %s is kept as it is: %s", target, error)
        return None


@cache
def _get_init_false_fields(target_class: Any) -> frozenset[str]:
    """Return the names of the fields with ``init=False``; none if the class is not a dataclass."""
    if not is_dataclass(target_class):
        return frozenset()
    return frozenset(each.name for each in fields(target_class) if not each.init)
