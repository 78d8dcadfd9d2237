"""The import of ``megatron`` and ``deepspeed`` from this folder, wherever else copies of them are."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from megatron_core.drop_in.named_modules import find_named_module

FOLDER = Path(__file__).resolve().parent
"""The folder for ``PYTHONPATH``: it holds the packages ``megatron`` and ``deepspeed``."""
DISTRIBUTIONS = ("deepspeed", "megatron-core")
"""Names by which ``importlib.metadata`` finds the packages."""


class DropInFinder:
    """Finds ``deepspeed`` and the packages of ``megatron`` in ``FOLDER``, before ``sys.path`` is searched.

    The place of ``FOLDER`` in ``sys.path`` is not enough: the interpreter puts the folder of a script before
    ``PYTHONPATH``, programs insert a clone of Megatron-LM at the start, and a ``megatron/__init__.py`` anywhere in
    ``sys.path`` hides a namespace package.
    """

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        """Return the module's place in ``FOLDER``; None for other modules."""
        named = find_named_module(name)
        if named is not None:
            return named
        if name == "deepspeed":
            return PathFinder.find_spec(name, [str(FOLDER)])
        if name == "megatron":
            # Other projects have parts of this namespace: megatron.bridge, megatron.energon.
            parts = [entry for entry in sys.path if not Path(entry, name, "__init__.py").is_file()]
            return PathFinder.find_spec(name, [str(FOLDER), *parts])
        parent, _, child = name.rpartition(".")
        if parent == "megatron" and Path(FOLDER, parent, child).is_dir():
            return PathFinder.find_spec(name, [str(FOLDER / parent)])
        return None

    @staticmethod
    def find_distributions(context: Any) -> Iterable[Any]:
        """Yield the metadata in ``FOLDER`` of a package of ``DISTRIBUTIONS``."""
        from importlib.metadata import DistributionFinder, MetadataPathFinder  # takes half the time of a start

        if context.name is None or context.name.lower().replace("_", "-") not in DISTRIBUTIONS:
            return []
        return MetadataPathFinder.find_distributions(DistributionFinder.Context(name=context.name, path=[str(FOLDER)]))

    @staticmethod
    def invalidate_caches() -> None:
        """Do nothing: ``PathFinder`` has the caches."""


def remove_finder() -> None:
    """Let other copies of the packages be found again: for comparisons with them."""
    if DropInFinder in sys.meta_path:
        sys.meta_path.remove(DropInFinder)


def install_finder() -> None:
    """Put the finder first in ``sys.meta_path``, once."""
    if DropInFinder not in sys.meta_path:
        sys.meta_path.insert(0, DropInFinder)  # as PathFinder: a class with static methods
