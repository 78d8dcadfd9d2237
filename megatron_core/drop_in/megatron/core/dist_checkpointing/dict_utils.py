"""Functions of nested dicts and lists; other values, also tuples, are leaves."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from torch import Tensor


def nested_items_iter(x: dict[Any, Any] | list[Any]) -> Iterator[tuple[Any, Any, Any]]:
    """Yield (container, key or index, leaf) of every leaf."""
    for key, value in list(x.items()) if isinstance(x, dict) else list(enumerate(x)):
        if isinstance(value, dict | list):
            yield from nested_items_iter(value)
        else:
            yield x, key, value


def nested_values(x: dict[Any, Any] | list[Any]) -> Iterator[Any]:
    """Yield every leaf."""
    for _, _, value in nested_items_iter(x):
        yield value


def dict_map_with_key(f: Callable[[Any, Any], Any], d: dict[Any, Any]) -> None:
    """Replace every leaf by ``f(key or index, leaf)``, in place."""
    for container, key, value in nested_items_iter(d):
        container[key] = f(key, value)


def dict_list_map_inplace(f: Callable[[Any], Any], x: Any) -> Any:
    """Replace every leaf by ``f(leaf)`` in place and return ``x``; ``f(x)`` if ``x`` is a leaf itself."""
    if not isinstance(x, dict | list):
        return f(x)
    for container, key, value in nested_items_iter(x):
        container[key] = f(value)
    return x


def dict_list_map_outplace(f: Callable[[Any], Any], x: Any) -> Any:
    """Return a copy in which ``f(leaf)`` replaces every leaf."""
    if isinstance(x, dict):
        return {key: dict_list_map_outplace(f, value) for key, value in x.items()}
    return [dict_list_map_outplace(f, value) for value in x] if isinstance(x, list) else f(x)


def extract_matching_values(x: Any, predicate: Callable[[Any], bool], return_lists_as_dicts: bool = False) -> Any:
    """Return (leaves for which ``predicate`` holds, the other leaves), each in the same nesting.

    Containers without such leaves are left out; empty containers are among the others, except that an empty container
    in a list is a leaf. ``return_lists_as_dicts`` keeps the indices of lists. Raises ValueError for a leaf.
    """
    if not isinstance(x, dict | list):
        raise ValueError(f"{type(x).__name__} is neither a dict nor a list; pass a state dict")
    found: tuple[dict[Any, Any], dict[Any, Any]] = {}, {}
    for key, value in x.items() if isinstance(x, dict) else enumerate(x):
        if isinstance(value, dict | list) and (value or isinstance(x, dict)):
            inside = extract_matching_values(value, predicate, return_lists_as_dicts)
            keep = bool(inside[0]), bool(inside[1]) or not value
        else:
            matches = bool(predicate(value))
            inside, keep = (value, value), (matches, not matches)
        for each, part, kept in zip(found, inside, keep, strict=True):
            if kept:
                each[key] = part
    as_dict = isinstance(x, dict) or return_lists_as_dicts
    return found if as_dict else tuple(list(each.values()) for each in found)


def diff(x1: Any, x2: Any, prefix: tuple[Any, ...] = ()) -> tuple[list[Any], list[Any], list[Any]]:
    """Return (paths only in ``x1``, paths only in ``x2``, differing values) of nested dicts, lists and tuples.

    A path has the keys from the outside to the inside. A differing value is (path, type in x1, type in x2), and for
    tensors also the number of unequal elements, their shape and indices, or the two shapes. Equal tensors may be on
    different devices. Objects with ``replica_id`` are compared by their ``data``.
    """
    left: list[Any]
    right: list[Any]
    pairs: list[Any]
    if isinstance(x1, dict) and isinstance(x2, dict):
        left = [(*prefix, key) for key in x1.keys() - x2.keys()]
        right = [(*prefix, key) for key in x2.keys() - x1.keys()]
        pairs = [(key, x1[key], x2[key]) for key in x1.keys() & x2.keys()]
    elif isinstance(x1, list | tuple | np.ndarray):
        assert type(x1) is type(x2), f"{type(x1)} and {type(x2)} at {prefix} cannot be compared"
        left, right = list(range(len(x1) - 1, len(x2) - 1, -1)), list(range(len(x2) - 1, len(x1) - 1, -1))
        pairs = [(index, *pair) for index, pair in enumerate(zip(x1, x2, strict=False))]
    elif hasattr(x1, "replica_id") and hasattr(x2, "replica_id"):
        assert type(x1) is type(x2), f"{type(x1)} and {type(x2)} at {prefix} cannot be compared"
        left, right, pairs = [], [], [(type(x1), x1.data, x2.data)]
    else:
        return [], [], _difference(x1, x2, prefix)
    mismatch: list[Any] = []
    for key, one, other in pairs:
        for found, more in zip((left, right, mismatch), diff(one, other, (*prefix, key)), strict=True):
            found.extend(more)
    return left, right, mismatch


def _difference(x1: Any, x2: Any, prefix: tuple[Any, ...]) -> list[Any]:
    kinds = prefix, type(x1), type(x2)
    if isinstance(x1, Tensor) and isinstance(x2, Tensor):
        if x1.shape != x2.shape:
            return [(*kinds, x1.shape, x2.shape)]
        unequal = x1 != x2.to(x1.device)
        return [(*kinds, unequal.sum(), unequal.shape, unequal.nonzero().tolist())] if unequal.any() else []
    try:
        return [kinds] if x1 != x2 else []
    except RuntimeError:  # a tensor and another kind of value
        return [kinds]


def inspect_types(x: Any, prefix: tuple[Any, ...] = (), indent: int = 4) -> None:
    """Print the type and the beginning of each leaf, indented by its depth."""
    if not isinstance(x, dict | list):
        text = f"Tensor of shape {x.shape}" if isinstance(x, Tensor) else f"[{type(x)}]: {str(x)[:30]}"
        print(text)
        return
    print()
    for key, value in x.items() if isinstance(x, dict) else enumerate(x):
        print(f"{' ' * indent * len(prefix)}{'>' if isinstance(x, dict) else '-'} {key}: ", end="")
        inspect_types(value, (*prefix, key), indent)


def merge(x1: Any, x2: Any, key: tuple[Any, ...] = ()) -> Any:
    """Add the leaves of ``x2`` to ``x1``, in place, and return it.

    Raises ValueError for lists of different lengths and for a leaf that both have.
    """
    if isinstance(x1, dict) and isinstance(x2, dict):
        for name, value in x2.items():
            x1[name] = merge(x1[name], value, (*key, name)) if name in x1 else value
        return x1
    if isinstance(x1, list) and isinstance(x2, list):
        if len(x1) != len(x2):
            raise ValueError(f"Cannot merge lists with {len(x1)} and {len(x2)} values at {key}; use equal lengths")
        x1[:] = [merge(one, other, (*key, index)) for index, (one, other) in enumerate(zip(x1, x2, strict=True))]
        return x1
    raise ValueError(f"Duplicate values at {key}: {x1} and {x2}; give each name once")


def map_reduce(
    xs: Iterable[Any],
    key_fn: Callable[[Any], Any] = lambda x: x,
    value_fn: Callable[[Any], Any] = lambda x: x,
    reduce_fn: Callable[[Any], Any] = lambda x: x,
) -> dict[Any, Any]:
    """Return ``reduce_fn`` of the list of ``value_fn(x)`` for each ``key_fn(x)``."""
    groups: dict[Any, list[Any]] = {}
    for x in xs:
        groups.setdefault(key_fn(x), []).append(value_fn(x))
    return {key: reduce_fn(values) for key, values in groups.items()}
