"""Names that packages offer and import when they are first used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module


def lazy_names(package: str, homes: Mapping[str, tuple[str, ...]]) -> Callable[[str], object]:
    """A ``__getattr__`` of ``package``, whose modules ``homes`` define the names."""

    def get(name: str) -> object:
        for home, names in homes.items():
            if name in names:
                return getattr(import_module(f"{package}.{home}"), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get
