"""The functions that are mutated, and the order in which their mutants are taken."""

from __future__ import annotations

import ast
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from types import FunctionType

import megatron_core
from tests.defects.source import definition_of, function_of
from tests.mutants.edits import Mutant, mutants_of

ROOT = Path(megatron_core.__file__).parent
PACKAGES: dict[str, tuple[str, ...]] = {
    "ops": ("operator", "native", "backend"),
    "tensor_parallel": (),
    "transformer": (),
    "models": (),
    "pipeline_parallel": (),
    "data_parallel": (),
    "optimizer": (),
    "parallel": (
        *("compiled", "configured", "current", "exit_status", "flight_recorder", "launch"),
        *(
            "meter",
            "pinned",
            "poison",
            "rank_local",
            "texts",
            "time_limit",
            "transports",
            "watched",
            "world",
        ),
    ),
    "training": (
        *("attempts", "callbacks", "compatibility", "fast_restarts", "loading", "loop", "pretrain", "process"),
        *("reports", "saving", "stop", "data", "parts", "setup", "state"),
    ),
    "datasets": ("header", "paths", "build"),
    "features/experts": ("settings", "rules", "sizes"),
    "features/output_losses": ("settings",),
    "features/positions": ("settings",),
    "features/layer_sizes": ("settings", "rules", "sizes", "spellings"),
    "features/context_parallelism": ("settings",),
    "features/latent_attention": ("settings", "kinds"),
    "features/loss_scaling": ("settings",),
    "features/matrix_optimizers": ("rows", "settings"),
    "features/sgd_and_lion": ("settings",),
}
"""Packages that compute, and their modules that compute nothing of a training: libraries and devices that a CPU lacks,
processes, messages, files."""


def modules() -> list[str]:
    """The mutated modules, without the name of the package."""
    names = []
    for package, without in PACKAGES.items():
        for path in sorted((ROOT / package).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            if path.stem != "__init__" and path.stem not in without:
                names.append(name)
    return names


def functions(module: str) -> dict[str, FunctionType]:
    """The functions and methods of a module that can be exchanged, by ``module:Qualname``."""
    import_module(f"megatron_core.{module}")
    path = ROOT.joinpath(*module.split(".")).with_suffix(".py")
    result = {}
    for qualname, definition in _definitions(ast.parse(path.read_text()), ""):
        target = f"{module}:{qualname}"
        function = function_of(target)
        if not isinstance(function, FunctionType) or Path(function.__code__.co_filename) != path:
            continue
        first = min([definition.lineno, *(decorator.lineno for decorator in definition.decorator_list)])
        if function.__code__.co_firstlineno == first:  # not an overload, or a setter of the same name
            result[target] = function
    return result


def _definitions(tree: ast.AST, prefix: str):
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from _definitions(node, f"{prefix}{node.name}.")


def all_mutants() -> list[Mutant]:
    """The mutants of all functions, so that each beginning of the list is an even sample.

    The order takes one mutant of each function, then a second one of each, and so on; which one, and the order of the
    functions, follow from a hash of their names.
    """
    keyed = []
    for module in modules():
        for target, function in functions(module).items():
            mutants = sorted(mutants_of(target, definition_of(function)), key=lambda mutant: _hash(mutant.name))
            keyed += [(turn, _hash(target), mutant) for turn, mutant in enumerate(mutants)]
    return [mutant for _, _, mutant in sorted(keyed, key=lambda item: item[:2])]


def _hash(text: str) -> str:
    return sha256(text.encode()).hexdigest()
