"""Import modules by the names that they had in the version before, with a note."""

from __future__ import annotations

import importlib
import sys
import warnings
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

PACKAGE = "megatron_core"
MOVED = {
    "datasets.validate": "preprocess.validate",
    "datasets.lengths": "preprocess.lengths",
    "datasets.atomic_write": "preprocess.atomic_write",
    "datasets.builder": "preprocess.builder",
    "datasets.preferences": "features.preferences.dataset",
    "datasets.megatron_order": "features.megatron_order",
    "datasets.fim": "features.fill_in_the_middle.dataset",
    "tokenizers.template_process": "features.conversations.template_process",
    "tokenizers.template_sandbox": "features.conversations.template_sandbox",
    "tokenizers.chat": "features.conversations.chat_template",
    "datasets.packing": "features.conversations.packing",
    "datasets.tool_calls": "features.conversations.tool_calls",
    "datasets.message_keys": "features.conversations.message_keys",
    "datasets.message_schemas": "features.conversations.schemas",
    "datasets.conversation_tokenizer": "features.conversations.encoder",
    "datasets.conversation_notes": "features.conversations.line_notes",
    "datasets.build_conversations": "features.conversations.build",
    "datasets.conversations": "features.conversations.dataset",
    "training.engine": "any_model",
}
"""New names of modules and packages by old ones, without the package's name."""


def new_name(module: str) -> str | None:
    """Today's name of a module with an old name; None for every other module."""
    parts = module.split(".")
    if parts[0] != PACKAGE:
        return None
    for length in range(len(parts), 1, -1):
        target = MOVED.get(".".join(parts[1:length]))
        if target is not None:
            return ".".join([PACKAGE, target, *parts[length:]])
    return None


class _NewModule(Loader):
    """Returns the module with the new name instead of loading a second copy."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        warnings.warn(f"{spec.name} has moved to {self.name}; import it from there", DeprecationWarning, stacklevel=2)
        module = importlib.import_module(self.name)
        self.spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The import system has replaced the module's own specification by that of the old name.
        module.__spec__ = self.spec


class OldNames(MetaPathFinder):
    """Finds modules by their old names. It comes first: a moved package's path would find its modules twice."""

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        """A specification that returns the module with the new name; None for names that did not move."""
        name = new_name(fullname)
        return None if name is None else ModuleSpec(fullname, _NewModule(name), is_package=True)


def install() -> None:
    """Let old names work in this process."""
    if not any(isinstance(finder, OldNames) for finder in sys.meta_path):
        sys.meta_path.insert(0, OldNames())
