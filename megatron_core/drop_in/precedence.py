"""The import of ``megatron`` and ``deepspeed`` from this folder, wherever else copies of them are."""

import sys
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from megatron_core.drop_in.named_modules import find_named_module

FOLDER = Path(__file__).resolve().parent
"""The folder for ``PYTHONPATH``: it holds the packages ``megatron`` and ``deepspeed``."""
DISTRIBUTIONS = ("deepspeed", "megatron-core")
"""Names by which ``importlib.metadata`` finds the packages."""


@cache
def own_megatron(*path: str) -> Path | None:
    """The folder of another project's package ``megatron`` in ``path``, of which the program needs modules of its own.

    Such as GPT-NeoX and Megatron-DeepSpeed, which began as copies of Megatron-LM before ``megatron.training`` became a
    package: of these programs only ``deepspeed`` is replaced.
    """
    for entry in path:
        package = Path(entry, "megatron")
        if (package / "__init__.py").is_file() and (package / "training.py").is_file():
            return package
    return None


class DropInFinder:
    """Finds ``deepspeed`` and the packages of ``megatron`` in ``FOLDER``, before ``sys.path`` is searched.

    The place of ``FOLDER`` in ``sys.path`` is not enough: the interpreter puts the folder of a script before
    ``PYTHONPATH``, programs insert a clone of Megatron-LM at the start, and a ``megatron/__init__.py`` anywhere in
    ``sys.path`` hides a namespace package.
    """

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        """Return the module's place in ``FOLDER``; None for other modules."""
        if name.partition(".")[0] == "megatron" and (own := own_megatron(*sys.path)) is not None:
            return PathFinder.find_spec(name, [str(own.parent)]) if name == "megatron" else None
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
