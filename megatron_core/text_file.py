"""Reads small text, YAML and JSON files given by a user."""

import json
import os
import re
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

LARGEST_TEXT = 2**24
"""Maximum size in bytes of a file of settings, paths or prompts; a device may be endless."""
LONGEST_NUMBER = 4300
"""Maximum number of characters of a number: Python's own limit of decimal digits."""
MOST_VALUES = 200_000
"""Maximum number of values in a YAML file, counting an alias's target at each use; they take about 2 s."""
DEEPEST = 100
"""Maximum nesting of lists and mappings."""


def refuse_pipe(path: str | Path) -> None:
    """ValueError for a named pipe, which would block until another process writes; that of <(command) has no name."""
    if Path(os.path.realpath(path)).is_fifo():
        raise ValueError("it is a named pipe; use a file")


def read_text(path: str | Path) -> str:
    """The text of a file, or of a pipe such as ``<(command)``.

    Errors: those of ``read_bytes``, and ValueError for text that is not UTF-8. A byte order mark is not part of the
    text.
    """
    return read_bytes(path, LARGEST_TEXT).decode("utf-8-sig")


def read_bytes(path: str | Path, most: int) -> bytes:
    """The content of a file, or of a pipe such as ``<(command)``.

    Errors: OSError, or ValueError for a named pipe (reading it would block until a process writes) and for more than
    ``most`` bytes.
    """
    refuse_pipe(path)
    with open(path, "rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"it has more than {most} bytes")
    return data


def parse_json(text: str) -> Any:
    """The value of a JSON text. ValueError: it is not valid JSON, is nested too deeply, or repeats a key."""
    try:
        return json.loads(text, object_pairs_hook=without_duplicates)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def parse_yaml(text: str) -> Any:
    """The value of a YAML text, constructed from plain types only.

    ValueError: it is not valid YAML, repeats a key, is nested deeper than ``DEEPEST``, has a number of more than
    ``LONGEST_NUMBER`` characters or in base 8 or 60 (in YAML 1.1, 010 is 8), or has more than ``MOST_VALUES`` values.
    """
    try:
        _check_events(text)
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _check_node(node, {})
        return loader.construct_document(node)
    except yaml.YAMLError as error:
        described = str(error).replace(' in "<unicode string>", line', " at line")
        raise ValueError(" ".join(described.split())) from None
    # Raised for a wrong tag, as in '!!int text'.
    except (LookupError, AttributeError, TypeError, ArithmeticError) as error:
        raise ValueError(f"a value does not fit its tag ({error})") from None


def read_table(module: str) -> Any:
    """The YAML table next to a module of this package, whose ``__file__`` is ``module``."""
    text = Path(module).with_suffix(".yaml").read_text(encoding="utf-8")
    return _Loader(text).get_single_data()


def without_duplicates(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    """The mapping of ``pairs``; ``ValueError`` for a key that occurs twice."""
    mapping: dict[Any, Any] = {}
    for key, value in pairs:
        if key in mapping:
            raise ValueError(f"{key} occurs twice; remove one")
        mapping[key] = value
    return mapping


def _check_events(text: str) -> None:
    """Check the nesting and the number of values before parsing, because libyaml has no recursion limit and overflows
    the stack at 100,000 levels."""
    level = values = 0
    for event in yaml.parse(text, Loader=_Loader):
        level += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        values += isinstance(event, yaml.NodeEvent)
        if level > DEEPEST:
            raise ValueError(_TOO_DEEP)
        if values > MOST_VALUES:
            raise ValueError(_TOO_MANY)


def _check_node(node: yaml.Node, known: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """Number of values in ``node``, counting an alias's target at each use, and its height.

    ``known`` has the result of each visited list and mapping, (0, 0) during the visit.
    ValueError: the node exceeds a limit of ``parse_yaml``.
    """
    if isinstance(node, yaml.ScalarNode):
        if node.tag.endswith((":int", ":float")) and len(node.value) > LONGEST_NUMBER:
            raise ValueError(f"it has a number of more than {LONGEST_NUMBER} characters")
        if node.tag.endswith((":int", ":float")) and re.match(r"[-+]?0[0-7_]+$|.*:", node.value):
            raise ValueError(f"{node.value} is a number in base 8 or 60; write a decimal number, or text in quotes")
        return 1, 0
    if known.get(id(node)) == (0, 0):
        raise ValueError("an alias refers to a value that contains it")
    if id(node) not in known:
        known[id(node)] = 0, 0
        children = node.value
        if isinstance(node, yaml.MappingNode):
            keys = (key.value for key, _ in children if isinstance(key, yaml.ScalarNode))
            without_duplicates((key, None) for key in keys if key != "<<")  # because the node may occur again
            children = chain.from_iterable(children)
        sizes, heights = zip((1, 0), *(_check_node(child, known) for child in children), strict=True)
        known[id(node)] = sum(sizes), 1 + max(heights)
    size, height = known[id(node)]
    if height > DEEPEST:
        raise ValueError(_TOO_DEEP)
    if size > MOST_VALUES:
        raise ValueError(_TOO_MANY)
    return size, height


_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the C loader takes a tenth of the time
_TOO_DEEP = f"it is nested deeper than {DEEPEST} levels"
_TOO_MANY = f"it has more than {MOST_VALUES:,} values, counting aliases and merge keys (<<) at each use"
