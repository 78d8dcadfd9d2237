"""Names of torch that CPU tests do not reach exist, and their functions have the used arguments."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from functools import reduce
from pathlib import Path

import torch
import torch.distributed

import megatron_core.parallel.collectives  # noqa: F401, registers an operator that the sources name

ROOT = Path(__file__).parents[1]
SOURCES = [
    ROOT / "pretrain_gpt.py",
    *(path for part in ("megatron_core", "tools") for path in (ROOT / part).rglob("*.py")),
]


def dotted(node: ast.expr) -> list[str]:
    """``["torch", "cuda", "Event"]`` of such an expression; empty for another."""
    if isinstance(node, ast.Name):
        return {"torch": ["torch"], "dist": ["torch", "distributed"]}.get(node.id, [])
    if isinstance(node, ast.Attribute):
        return [*inner, node.attr] if (inner := dotted(node.value)) else []
    return []


def faults(text: str) -> Iterator[str]:
    """Missing names, and arguments that a function does not have."""
    for node in ast.walk(ast.parse(text)):
        names = dotted(node) if isinstance(node, ast.Attribute) else []
        found: object = torch
        for name in names[1:]:
            if not hasattr(found, name):
                yield f"line {node.lineno}: {'.'.join(names)}"
                break
            found = getattr(found, name)
        if not isinstance(node, ast.Call) or not (names := dotted(node.func)):
            continue
        found = reduce(lambda module, name: getattr(module, name, None), names[1:], torch)
        if not inspect.isfunction(found):
            continue
        parameters = inspect.signature(found).parameters
        if not any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
            unknown = [each.arg for each in node.keywords if each.arg and each.arg not in parameters]
            yield from (f"line {node.lineno}: {'.'.join(names)} has no argument {name}" for name in unknown)


def test_names_exist() -> None:
    found = {str(path.relative_to(ROOT)): list(faults(path.read_text(encoding="utf-8"))) for path in SOURCES}
    assert {path: own for path, own in found.items() if own} == {}


def test_finds_what_is_absent() -> None:
    assert set(faults("torch.cuda.memory.allocated(0)\ntorch.cuda.memory_allocated(gpu=0)")) == {
        "line 1: torch.cuda.memory.allocated",
        "line 2: torch.cuda.memory_allocated has no argument gpu",
    }
