"""The table of the keys of DeepSpeed's JSON."""

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml


class Key(NamedTuple):
    """A row of the table ``keys.yaml``."""

    use: str
    """translated, without_effect or refused."""
    text: str
    """The setting, the reason or the fix."""
    neutral: str | None = None
    """The value of a refused key that is accepted, besides false, 0, null and none."""


@cache
def known_keys() -> dict[str, Key]:
    """The table ``keys.yaml`` by dotted path; ``section.*`` stands for all keys of a section."""
    table = yaml.safe_load(Path(__file__).with_name("keys.yaml").read_text(encoding="utf-8"))
    found = {path: Key("translated", text) for path, text in table["translated"].items()}
    for use, name in (("without_effect", "reason"), ("refused", "fix")):
        for row in table[use]:
            for entry in row["keys"]:
                path, _, neutral = entry.partition("=")
                found[path] = Key(use, row[name], neutral or None)
    return found


def find_key(path: str) -> Key | None:
    """Return the row of a dotted path, or of a section around it; None for an unknown key."""
    table = known_keys()
    parts = path.split(".")
    above = (f"{'.'.join(parts[:count])}.*" for count in range(len(parts), 0, -1))
    return next((table[each] for each in (path, *above) if each in table), None)


def is_section(path: str) -> bool:
    """Whether ``path`` is a section around known keys."""
    return any(name.startswith(f"{path}.") for name in known_keys())


def leaves(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """All dotted paths with their values, without sections that are null."""
    for name, value in values.items():
        path = f"{above}{name}"
        if isinstance(value, Mapping) and (is_section(path) or f"{above}*" in known_keys() or find_key(path)):
            yield from leaves(value, f"{path}.")
        elif not (is_section(path) and value is None):
            yield path, value


def has_enabled(value: Any) -> bool:
    """Whether a section, or any section below it, has ``"enabled": true``."""
    return isinstance(value, Mapping) and (value.get("enabled") is True or any(map(has_enabled, value.values())))


def key_names() -> list[str]:
    """All known dotted paths and their sections."""
    paths = [each.removesuffix(".*").split(".") for each in known_keys()]
    return sorted({".".join(parts[:count]) for parts in paths for count in range(1, len(parts) + 1)})
