"""Hooks of the web site (mkdocs.yml): pages of the programming interface, and links to files outside of docs/.

The interface has a page for each public package, with every name that the package exports. Names come from the syntax
tree of its ``__init__``; mkdocstrings reads signatures and docstrings in the same way, so that nothing is imported.
"""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "megatron_core"
PACKAGES = {
    "": "Train any module, split it over ranks",
    "config": "Settings of a run",
    "schedules": "Pipeline schedules",
    "planner": "Memory and time of a layout",
    "parallel": "Ranks, groups and launch",
    "tensor_parallel": "Parallel layers and their collectives",
    "features.context_parallelism": "Attention over split sequences",
    "ops": "Fused operations",
    "transformer": "Layers",
    "data_parallel": "Gradients and ZeRO",
    "optimizer": "Optimizers",
    "datasets": "Data sets",
    "checkpoint": "Checkpoints",
    "monitor": "Events and metrics",
    "training": "Training runs and callbacks",
    "inference": "Generation",
    "post_training": "Reinforcement learning",
    "verify": "Comparison with one process",
}
"""Public packages, in the order of the navigation."""
OPTIONS = """\
    options:
      heading_level: 2
"""
LOW_IN_SEARCH = "---\nsearch:\n  boost: 0.1\n---\n\n"
"""Head of a page that the search ranks below guides with the same words."""
NAMED_BY_FILE = re.compile(r"\[`?([\w/.]*?\w+\.md)`?\]\(([\w/.]+\.md)(#[^)\s]*)?\)")
TITLE = re.compile(r"^# (.+)$", re.MULTILINE)
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((\.\./[^)#\s]+)(#[^)\s]*)?\)")


def exported_names(package: str) -> list[str]:
    """Public names that a package's ``__init__`` imports, by the path of their definition, in its order."""
    folder = ROOT.joinpath(PACKAGE, *package.split("."))
    stub = folder / "__init__.pyi"
    tree = ast.parse((stub if stub.is_file() else folder / "__init__.py").read_text(encoding="utf-8"))
    dotted = f"{PACKAGE}.{package}" if package else PACKAGE
    return [
        f"{dotted}.{node.module}.{alias.name}" if node.level else f"{node.module}.{alias.name}"
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and f"{node.module}".startswith(PACKAGE if not node.level else "")
        for alias in node.names
        if not alias.name.startswith("_") and not is_of_torch(package, node, alias.name)
    ]


def is_of_torch(package: str, node: ast.ImportFrom, name: str) -> bool:
    """Whether the module that ``node`` imports ``name`` from has it from torch, whose documentation describes it."""
    path = ROOT.joinpath(PACKAGE, *package.split("."), *f"{node.module}".split(".")).with_suffix(".py")
    if not node.level or not path.is_file():
        return False
    imports = [each for each in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(each, ast.ImportFrom)]
    return any(f"{each.module}".split(".")[0] == "torch" and name in {a.name for a in each.names} for each in imports)


def interface_page(package: str, title: str) -> str:
    """The page of a package, for mkdocstrings."""
    dotted = f"{PACKAGE}.{package}" if package else PACKAGE
    parts = [f"{LOW_IN_SEARCH}# {dotted}\n\n{title}: `from {dotted} import ...`\n"]
    parts += [f"::: {name}\n{OPTIONS}" for name in exported_names(package)]
    return "\n".join(parts)


def page_name(package: str) -> str:
    """File of a package's page, below docs/."""
    return f"api/{package or PACKAGE}.md"


def with_interface(nav: Any) -> Any:
    """The navigation with the pages of the interface in place of ``api``."""
    if isinstance(nav, dict):
        return {title: with_interface(entry) for title, entry in nav.items()}
    if isinstance(nav, list):
        return [with_interface(entry) for entry in nav]
    return [page_name(package) for package in PACKAGES] if nav == "api" else nav


def on_config(config: Any) -> Any:
    """Add the pages of the interface to the navigation; without mike there is no list of versions to select from."""
    config.nav = with_interface(config.nav)
    if "MIKE_DOCS_VERSION" not in os.environ:
        del config.extra["version"]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of the interface."""
    from mkdocs.structure.files import File

    for package, title in PACKAGES.items():
        files.append(File.generated(config, page_name(package), content=interface_page(package, title)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Name pages by their titles, and replace links to files outside of docs/, which the site does not have, by their
    text."""
    folder = (ROOT / "docs" / page.file.src_uri).parent

    def without(found: re.Match[str]) -> str:
        target = (folder / found[2]).resolve()
        return found[0] if target.is_relative_to(ROOT / "docs") or not target.exists() else found[1]

    def titled(found: re.Match[str]) -> str:
        target = folder / found[2]
        title = TITLE.search(target.read_text(encoding="utf-8")) if target.is_file() else None
        return f"[{title[1]}]({found[2]}{found[3] or ''})" if title else found[0]

    return LINK.sub(without, NAMED_BY_FILE.sub(titled, markdown))
