"""Which modules are the core, which belong to a feature, and which to a satellite.

A feature is a folder of ``megatron_core/features``.

One module looks optional and belongs to the core: ``parallel.compiled`` says which modules run hooks and how
collectives appear in a graph. Collectives, linear layers and data parallelism ask it in every run, because a program
may compile its own model.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = "megatron_core"

SATELLITES = (
    *("planner", "verify", "inference", "preprocess", "commands", "drop_in", "any_model", "shell", "storage"),
    *("hub", "cpu_ranks", "data_parts", "resilience", "reports", "post_training", "vocabularies", "foreign_json"),
    *("parallel_state", "prepared_output"),
)
"""Packages outside of the core that are not features. ``parallel_state`` has Megatron's functions for users' programs;
a run makes its groups with ``parallel.configured``. ``launcher`` is core: every start reads the ranks of torchrun, even
the command line, which may not import ``parallel``."""


@cache
def modules() -> dict[str, Path]:
    """The path of every module by its name without the package's, such as ``training.loop``."""
    files = sorted((ROOT / PACKAGE).rglob("*.py"))
    return {name_of(path): path for path in files}


def name_of(path: Path) -> str:
    """The module of a file; a package's name for its ``__init__``."""
    parts = path.relative_to(ROOT / PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_below(module: str, package: str) -> bool:
    """Whether ``module`` is ``package`` or in it."""
    return module == package or module.startswith(f"{package}.")


@cache
def part_of(module: str) -> str:
    """``core``, the name of a satellite, or ``feature NAME``."""
    if is_below(module, "features"):
        return "feature " + [*module.split("."), "list"][1]
    return next((package for package in SATELLITES if is_below(module, package)), "core")


def is_core(module: str) -> bool:
    """Whether every run needs the module, by this table."""
    return part_of(module) == "core"
