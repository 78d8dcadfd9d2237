"""The hooks of the web site: pages of the Python interface, and links that leave docs/."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("site_hooks", ROOT / "docs" / "site_hooks.py")
assert SPEC is not None and SPEC.loader is not None
hooks = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(hooks)
EMPTY = {
    "data_parts",
    "resilience",
    "reports",
    "cpu_ranks",
    "pipeline_parallel",
    "models",
    "drop_in",
    "features",
    "hub",
    "preprocess",
    "tokenizers",
    "vocabularies",
    "commands",
    "shell",
    "storage",
    "any_model",
}
"""Packages without a page: they export few names or none, or the names of other projects."""


@pytest.mark.parametrize("package", hooks.PACKAGES)
def test_names_of_the_interface_can_be_imported(package: str) -> None:
    names = hooks.exported_names(package)
    exporter = importlib.import_module(".".join(filter(None, [hooks.PACKAGE, package])))
    page = hooks.interface_page(package, "Title")
    assert names and len(names) == len(set(names))
    for path in names:
        module, _, name = path.rpartition(".")
        assert getattr(importlib.import_module(module), name) is getattr(exporter, name), path
        assert f"\n::: {path}\n" in page


def test_every_package_has_a_page_or_a_reason() -> None:
    packages = {path.parent.name for path in (ROOT / hooks.PACKAGE).glob("*/__init__.py")}
    assert packages == {name for name in hooks.PACKAGES if name and "." not in name} | EMPTY


def test_every_page_is_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = [str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")]
    assert len(pages) > 50 and [page for page in pages if f" {page}\n" not in text] == []
    entries = hooks.with_interface([{"Extend": ["extend.md", {"Python interface": "api"}]}])
    assert entries[0]["Extend"][1]["Python interface"][0] == "api/megatron_core.md"


def test_links_that_leave_the_folder_become_text() -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="book/index.md"))
    kept = "[a](../train.md) [b](../train.md#while-it-runs) [c](https://x.y) ![d](../images/e.png)"
    assert hooks.on_page_markdown(f"{kept} [rules](../../CONTRIBUTING.md#walks).", page) == f"{kept} rules."


def test_pages_are_named_by_their_titles() -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="book/index.md"))
    text = "[data.md](../data.md#blends), [`fp8.md`](../fp8.md), [here](../train.md), [no.md](../no.md)"
    titled = "[Data: from text to batches](../data.md#blends), [Train in FP8](../fp8.md), "
    assert hooks.on_page_markdown(text, page) == titled + "[here](../train.md), [no.md](../no.md)"


def test_the_selector_of_versions_is_left_out_without_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """It requests versions.json, which only ``make site-version`` writes."""
    for version in ("", "0.2"):
        config = SimpleNamespace(nav=[], extra={"version": {"provider": "mike"}})
        if version:
            monkeypatch.setenv("MIKE_DOCS_VERSION", version)
        assert ("version" in hooks.on_config(config).extra) == bool(version)


def test_guides_rank_above_the_interface_which_leaves_out_names_of_torch() -> None:
    page = hooks.interface_page("", "Title")
    assert page.startswith("---\nsearch:\n  boost: 0.1\n---\n\n# megatron_core\n")
    assert "sharded_module.fully_shard\n" in page and "CPUOffloadPolicy" not in page


def test_the_package_deepspeed_imports_its_modules_by_their_full_names() -> None:
    """``make site`` reads megatron_core/drop_in/deepspeed under this path, where it cannot resolve ``deepspeed``."""
    folder = ROOT / hooks.PACKAGE / "drop_in" / "deepspeed"
    own_modules = {path.stem for path in folder.iterdir() if path.suffix == ".py" or list(path.glob("*.py"))}
    imported = ast.parse((folder / "__init__.py").read_text(encoding="utf-8")).body
    names = [
        alias.name
        for node in imported
        if isinstance(node, ast.ImportFrom) and node.module == "deepspeed"
        for alias in node.names
    ]
    assert len(own_modules) > 10 and not own_modules & set(names)
