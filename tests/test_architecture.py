"""Rules of the code base as tests: imports, sizes, docstrings, and forbidden constructs."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.structure.imports import nodes, tree

ROOT = Path(__file__).parent.parent
PACKAGE = "megatron_core"

# The import table: one level per package (``parallel.grid`` is arithmetic, below the process groups of its package). A
# package may import itself and lower levels.
LEVELS = {
    "errors": 0,
    "feature": 0,
    "moved": 0,
    "command": 0,
    "locations": 0,
    "launcher": 0,
    "foreign_json": 0,
    "terminal": 0,
    "text_file": 0,
    "output_file": 0,
    "prepared_output": 0,
    "schedules": 0,
    "shell": 0,
    "config": 0,
    "parallel.grid": 1,
    "planner": 1,
    "ops": 2,
    "tokenizers": 2,
    "vocabularies": 3,  # features and preprocess read texts with it
    "parallel": 2,
    "parallel_state": 3,
    "tensor_parallel": 3,
    "datasets": 3,
    "checkpoint": 3,
    "monitor": 3,
    "data_parts": 4,
    "preprocess": 5,  # writes datasets' files; only tools import it
    "transformer": 4,
    "data_parallel": 4,
    "pipeline_parallel": 4,
    "models": 5,
    "optimizer": 5,
    "training": 6,
    # The core ends here. Settings and rules of features have level 0, their other modules FEATURE_LEVEL.
    "hub": 8,
    "cpu_ranks": 7,
    "storage": 7,
    "resilience": 9,  # compares hashes as reports do
    "reports": 8,
    "inference": 8,  # serves chats
    "any_model": 9,
    "post_training": 9,
    "verify": 10,
    "drop_in": 10,  # ``megatron`` and ``deepspeed`` below it are separate packages
    "commands": 11,
}
FEATURE_LEVEL = 7
FEATURES_THAT_IMPORT_FEATURES = {
    "length_warmup": {"batch_growth"},  # the length is a ramp as that of batches
    "compression": {"lamb"},  # 1-bit LAMB is an update of LAMB
    "fp8": {"experts"},  # other products of experts
    "mxfp8_messages": {"experts", "fp8"},  # messages of experts; casts
    "equal_bits": {"experts", "context_parallelism"},  # sums in another order
    "lora": {"experts"},  # adapters of experts
    "distillation": {"preferences", "lora"},  # a second, frozen model, which has no adapters
    "paired_passes": {"experts"},  # what runs while their messages are in flight
    "compilation": {"layer_sizes"},  # layers of which a part is one linear layer
    "outer_steps": {"averages", "lamb"},  # evaluations with other weights; sums over whole tensors
    "qk_clip": {"latent_attention"},  # which rows of its matrices are those of queries and keys
    "sparse_attention": {"latent_attention"},  # selected keys are those of latents
    "preferences": {"conversations", "lora"},  # lines have two conversations; the reference is without adapters
}
"""The features which a feature imports, as its page says."""
WITHIN_LEVEL_0 = {("command", "errors"), ("command", "terminal"), ("terminal", "errors"), ("config", "schedules")}
WITHIN_LEVEL_0 |= {("prepared_output", "errors"), ("prepared_output", "output_file")}
WITHIN_LEVEL_0 |= {("output_file", "errors"), ("config", "locations"), ("config", "feature"), ("feature", "errors")}
WITHIN_LEVEL_0 |= {("launcher", "errors"), ("config", "launcher"), ("locations", "errors"), ("locations", "feature")}
WITHIN_LEVEL_0 |= {
    ("foreign_json", "errors"),
    ("foreign_json", "text_file"),
    ("storage", "moved"),
    ("features", "moved"),
}
WITHIN_LEVEL_0 |= {("features", "schedules"), ("schedules", "feature"), ("schedules", "moved")}
BASES = ("errors", "foreign_json", "terminal", "text_file", "output_file")
WITHIN_LEVEL_0 |= {(own, other) for own in ("schedules", "config", "shell") for other in BASES}
# In addition to the levels.
NEVER = {"transformer": {"schedules"}}
OUTSIDE = {0: {"tyro", "yaml"}, 1: set()}

PROGRAMS = [ROOT / "pretrain_gpt.py", *sorted((ROOT / "tools").rglob("*.py"))]
ADAPTERS = ROOT / PACKAGE / "drop_in"
"""The packages that programs written for Megatron-LM and DeepSpeed import."""
DROP_IN = sorted(path for name in ("megatron", "deepspeed") for path in (ADAPTERS / name).rglob("*.py"))
TRANSLATOR = ROOT / PACKAGE / "commands" / "deepspeed_config.py"
"""The only command that imports ``drop_in``: it translates DeepSpeed's configuration."""
LIBRARY = sorted(set((ROOT / PACKAGE).rglob("*.py")) - set(DROP_IN))
SOURCES = LIBRARY + DROP_IN + PROGRAMS
MAX_FILE, MAX_FUNCTION = 400, 80


def module_name(path: Path) -> str:
    """``parallel.grid`` for megatron_core/parallel/grid.py; a package's name for its ``__init__``."""
    parts = path.relative_to(ROOT / PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FEATURES = sorted(path.name for path in (ROOT / PACKAGE / "features").iterdir() if (path / "__init__.py").is_file())
DECLARATIONS = ("settings", "rules", "spellings")
"""Modules of a feature that are loaded with the configuration, as its package file is."""
for feature in FEATURES:
    LEVELS[f"features.{feature}"] = 0
    LEVELS |= {
        f"features.{feature}.{path.stem}": FEATURE_LEVEL
        for path in (ROOT / PACKAGE / "features" / feature).glob("*.py")
    }
    LEVELS |= {f"features.{feature}.{name}": 0 for name in ("__init__", *DECLARATIONS)}
LEVELS["features"] = 0
SATELLITES_WITH_SETTINGS = ("hub", "resilience", "reports", "cpu_ranks", "storage", "data_parts", "vocabularies")
"""Packages outside of ``features`` that may register themselves in the same way; their package files, ``settings.py``
and ``rules.py`` have level 0."""
for satellite in SATELLITES_WITH_SETTINGS:
    if (ROOT / PACKAGE / satellite / "__init__.py").is_file():
        level = LEVELS[satellite]
        LEVELS |= {f"{satellite}.{path.stem}": level for path in (ROOT / PACKAGE / satellite).iterdir()}
        LEVELS |= {satellite: 0} | {f"{satellite}.{name}": 0 for name in DECLARATIONS}
        WITHIN_LEVEL_0 |= {("features", satellite)} | {
            (satellite, other) for other in ("config", "feature", "locations", *BASES)
        }
WITHIN_LEVEL_0 |= {("features", other) for other in ("config", "feature", *BASES)}


def unit_of(module: str) -> str:
    """The module's entry in the table."""
    parts = module.split(".")
    candidates = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((name for name in candidates if name in LEVELS), f"{module} is in no level of the table")


def imports(path: Path) -> Iterator[str]:
    """Full names of all imported modules, and of names from packages: ``megatron_core.parallel.collectives``."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the level"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def inner_imports(path: Path) -> list[str]:
    """Modules of this package that a file imports, without the package's name."""
    return [name.split(".", 1)[1] for name in imports(path) if name.startswith(f"{PACKAGE}.")]


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def forbidden_import(importer: str, imported: str) -> str | None:
    """The reason why a module must not import another; None if it may."""
    ours, theirs = unit_of(importer), unit_of(imported)
    family, other = ours.split(".")[0], theirs.split(".")[0]
    if other in NEVER.get(family, ()):
        return f"{importer} may not import {imported}"
    if other == "features":
        feature, other_feature = (name.split(".")[1:2] for name in (importer, imported))
        if family == "features":
            named = FEATURES_THAT_IMPORT_FEATURES.get("".join(feature), set())
            is_allowed = importer == "features" or feature == other_feature or "".join(other_feature) in named
        else:
            is_allowed = LEVELS[ours] > FEATURE_LEVEL
        return None if is_allowed else f"{importer} may not import {imported}, which belongs to a feature"
    if family == other and family in SATELLITES_WITH_SETTINGS and LEVELS[theirs] <= LEVELS[ours]:
        return None
    if LEVELS[theirs] < LEVELS[ours] or ours == theirs or (family, other) in WITHIN_LEVEL_0:
        return None
    return f"{importer} (level {LEVELS[ours]}) imports {imported} (level {LEVELS[theirs]})"


def test_import_table() -> None:
    found = [
        forbidden_import(module_name(path), name)
        for path in LIBRARY
        if module_name(path)
        for name in inner_imports(path)
    ]
    assert [sentence for sentence in found if sentence] == []


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """A cycle of imports; empty if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_no_package_cycle() -> None:
    """Imports for type checkers count, too."""
    graph: dict[str, set[str]] = defaultdict(set)
    for path in LIBRARY:
        package = module_name(path).split(".")[0]
        if module_name(path) == "features":  # the list of declarations, which also names satellites
            continue
        graph[package] |= {name.split(".")[0] for name in inner_imports(path)} - {package}
    assert cycle(graph) == []
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"a"}})


def test_no_module_cycle() -> None:
    modules = {module_name(path) for path in LIBRARY}
    graph = {
        module_name(path): {name if name in modules else name.rpartition(".")[0] for name in inner_imports(path)}
        for path in LIBRARY
    }
    assert cycle(graph) == []


@pytest.mark.parametrize(
    ("importer", "imported"),
    [
        ("transformer.block", "data_parallel.buffer"),
        ("transformer.block", "schedules.actions"),
        ("checkpoint.boxes", "tensor_parallel"),
        ("schedules.checks", "pipeline_parallel.executor"),
        ("parallel.grid", "parallel.groups"),
        ("models.gpt.model", "optimizer.clip"),
        ("planner.cost", "parallel.groups"),
    ],
)
def test_the_table_forbids_something(importer: str, imported: str) -> None:
    assert forbidden_import(importer, imported)
    assert forbidden_import("tensor_parallel.layers", "parallel.current") is None


def test_rules_do_not_import_one_another() -> None:
    """A rule reads settings and returns messages; what several rules share is in ``config.rule_helpers``."""
    rules = sorted((ROOT / PACKAGE / "config").glob("rules_*.py"))
    assert len(rules) > 5
    for path in rules:
        assert not re.findall(r"^from megatron_core\.config\.rules_\w+ import", path.read_text(), re.M), path.name


def test_low_levels_import_little_from_outside() -> None:
    found = []
    for path in LIBRARY:
        level = LEVELS[unit_of(module_name(path))] if module_name(path) else 0
        allowed = {PACKAGE, *sys.stdlib_module_names, *OUTSIDE.get(level, ())}
        allowed |= {"lazy_loader"} if path.name == "__init__.py" else set()
        if level in OUTSIDE:
            found += [f"{relative(path)}: {name}" for name in imports(path) if name.split(".")[0] not in allowed]
    assert found == []


def test_low_levels_do_not_load_torch() -> None:
    """Also not indirectly: the planner and ``--help`` start without it."""
    modules = [
        f"{PACKAGE}.{module_name(path)}".rstrip(".")
        for path in LIBRARY
        if not module_name(path) or LEVELS[unit_of(module_name(path))] <= 1
    ]
    assert f"{PACKAGE}.parallel.grid" in modules
    lines = [f"import {module}; assert 'torch' not in sys.modules, '{module} loads torch'" for module in modules]
    subprocess.run([sys.executable, "-c", "import sys\n" + "\n".join(lines)], cwd=ROOT, check=True)


def test_nobody_imports_private_names() -> None:
    found = [
        f"{relative(path)}: {name}"
        for path in SOURCES
        for name in imports(path)
        if name.startswith((PACKAGE, "megatron."))
        and any(re.match("_(?!_)", part) for part in name.split("."))
        and not (path in DROP_IN and is_private_name_of_megatron(path, name))
    ]
    assert found == []


def is_private_name_of_megatron(path: Path, name: str) -> bool:
    """Whether a drop-in module imports from the engine's module at the same path, which defines the name, or a public
    name from a module that is private in Megatron Core."""
    module, _, last = name.rpartition(".")
    is_from_private_module = module.startswith("megatron.core._") and not last.startswith("_")
    return is_from_private_module or name.startswith(dotted(path).replace("megatron.core", PACKAGE, 1) + ".")


def _size(lines: list[str]) -> int:
    """Number of lines that are not only a comment: a reason must not cost the room of code."""
    return sum(not line.lstrip().startswith("#") for line in lines)


def test_file_sizes() -> None:
    lines = {relative(path): _size(path.read_text().splitlines()) for path in SOURCES}
    assert {name: n for name, n in lines.items() if n > MAX_FILE} == {}


def test_function_sizes() -> None:
    found = {
        f"{relative(path)}: {node.name}": _size(lines[node.lineno - 1 : node.end_lineno])
        for path in SOURCES
        for lines in [path.read_text().splitlines()]
        for node in nodes(path)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    }
    assert {name: n for name, n in found.items() if n > MAX_FUNCTION} == {}


def test_nothing_imports_the_drop_in() -> None:
    """The engine and the programs do not depend on ``drop_in``, ``megatron`` or ``deepspeed``."""
    found = [
        f"{relative(path)}: {name}"
        for path in [*LIBRARY, *PROGRAMS]
        if ADAPTERS not in path.parents and path != TRANSLATOR
        for name in imports(path)
        if name.split(".")[0] in ("megatron", "deepspeed") or name.startswith(f"{PACKAGE}.drop_in")
    ]
    assert found == []


DRIVER = f"{PACKAGE}/training/driver.py"
PHASES = {"finish_grad_sync", "gradient_norm", "start_param_sync"}
"""Methods of ``DataParallel`` and ``Optimizer`` for the phases of a step after the backward."""


def calls(path: Path) -> Iterator[ast.Call]:
    return (node for node in nodes(path) if isinstance(node, ast.Call))


def test_one_driver_runs_every_step() -> None:
    """Only the driver constructs the executor and calls the phases of a step.

    The drop-in's ``DistributedDataParallel`` and optimizer call the driver's functions; in addition Megatron has public
    functions that only compute the norm or only gather weights.
    """
    executors = [
        relative(path)
        for path in SOURCES
        for call in calls(path)
        if ast.unparse(call.func).split(".")[-1] == "Executor"
    ]
    assert executors == [DRIVER]
    found = {
        relative(path): {call.func.attr for call in calls(path) if isinstance(call.func, ast.Attribute)} & PHASES
        for path in LIBRARY + PROGRAMS
    }
    assert {name: phases for name, phases in found.items() if phases} == {DRIVER: PHASES}
    bypasses = ("data_parallel.finish_grad_sync", "self.optimizer.step")
    assert [
        f"{relative(path)}:{call.lineno}"
        for path in DROP_IN
        for call in calls(path)
        if ast.unparse(call.func).endswith(bypasses)
    ] == []


def dotted(path: Path) -> str:
    """``megatron.core.enums`` for drop_in/megatron/core/enums.py; a package's name for its ``__init__``."""
    parts = path.relative_to(ADAPTERS).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_the_drop_in_has_no_cycle() -> None:
    modules = {dotted(path): path for path in DROP_IN}
    graph = {
        name: {other if other in modules else other.rpartition(".")[0] for other in imports(path)} & set(modules)
        for name, path in modules.items()
    }
    # A package file may import its own modules, and these may import their package's other modules.
    graph = {name: others for name, others in graph.items() if modules[name].name != "__init__.py"}
    assert len(graph) > 100
    assert cycle(graph) == []


def test_no_package_of_the_drop_in_imports_everything() -> None:
    """``import *`` from a package of the engine would bind its modules in place of the modules of the same names."""
    packages = [path for path in DROP_IN if path.name == "__init__.py"]
    assert [relative(path) for path in packages for name in imports(path) if name.endswith(".*")] == []
    assert f"{PACKAGE}.parallel_state.*" in imports(ADAPTERS / "megatron" / "core" / "parallel_state.py")


def test_no_file_of_leftovers() -> None:
    leftovers = ("utils", "util", "helpers", "misc")
    assert [relative(p) for p in LIBRARY + PROGRAMS if p.stem in leftovers] == []


RESTRICTED = "megatron_core/hub/megatron_lm/pickles.py"
"""Reads foreign pickles with an unpickler that accepts only names in its own list."""
WRITES_FOR_TORCH = (
    "megatron_core/drop_in/deepspeed/runtime/weights_file.py",
    "megatron_core/hub/megatron_lm/writer.py",
)
"""Writes tensors for programs that read them with ``torch.load(weights_only=True)``; nothing reads them here."""
OVERRIDDEN_CUDA = "megatron_core/drop_in/megatron/training/models/dist_utils.py"
"""Programs for Megatron-LM override ``cuda`` of a model's chunk, which this file calls."""
SERIALISERS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}


def unwanted(node: ast.AST) -> str | None:
    """Constructs that are forbidden everywhere."""
    if isinstance(node, ast.Global):
        return "global statement"
    if isinstance(node, ast.keyword) and node.arg in ("shell", "allow_pickle"):
        return None if isinstance(node.value, ast.Constant) and node.value.value is False else f"{node.arg}=..."
    if not isinstance(node, ast.Call):
        return None
    if isinstance(node.func, ast.Name):
        return f"{node.func.id}(...)" if node.func.id in ("eval", "exec") else None
    called = ast.unparse(node.func)
    if called == "torch.load" and any(ast.unparse(keyword) == "weights_only=True" for keyword in node.keywords):
        return None
    if called in (
        "torch.load",
        "torch.save",
        "yaml.load",
        "yaml.unsafe_load",
        "yaml.full_load",
        "os.system",
        "os.popen",
    ):
        return called
    return called if called.endswith(".cuda") else None


def test_nothing_unsafe_or_hidden() -> None:
    """No ``.cuda()``, no ``global``; no pickle, ``eval`` or shell: data from files is never executed."""
    found = []
    for path in SOURCES:
        found += [
            f"{relative(path)}:{node.lineno}: {unwanted(node)}"
            for node in nodes(path)
            if unwanted(node)
            and not (unwanted(node) == "torch.save" and relative(path) in WRITES_FOR_TORCH)
            and not (unwanted(node) == "model.cuda" and relative(path) == OVERRIDDEN_CUDA)
        ]
        imported = [name for name in imports(path) if name.split(".")[0] in SERIALISERS]
        found += [f"{relative(path)}: {name}" for name in imported if relative(path) != RESTRICTED]
    assert found == []


def test_the_restricted_unpickler_is_the_only_use_of_pickle() -> None:
    of_file = nodes(ROOT / RESTRICTED)
    used = {ast.unparse(node) for node in of_file if isinstance(node, ast.Attribute)}
    assert {name for name in used if name.startswith("pickle.")} == {"pickle.Unpickler", "pickle.UnpicklingError"}
    classes = [node for node in of_file if isinstance(node, ast.ClassDef)]
    classes = [node for node in classes if "pickle.Unpickler" in map(ast.unparse, node.bases)]
    assert [[each.name for each in node.body if isinstance(each, ast.FunctionDef)] for node in classes] == [
        ["find_class"]
    ]
    called = [node for node in of_file if isinstance(node, ast.Call) and ast.unparse(node.func) == "pickle.Unpickler"]
    assert called == []


@pytest.mark.parametrize(
    "code", ["x.cuda()", "def f():\n global a", "torch.load(p)", "eval(s)", "run(c, shell=True)", "yaml.load(f)"]
)
def test_the_rules_find_something(code: str) -> None:
    assert any(unwanted(node) for node in ast.walk(ast.parse(code)))


def test_the_core_imports_no_feature() -> None:
    """Neither at the top of a module nor in a function; ``features`` itself is loaded by its name."""
    assert forbidden_import("transformer.attention", "features.qk_clip.clip")
    assert forbidden_import("config.validate", "features.qk_clip")
    assert forbidden_import("features.qk_clip.clip", "features.qk_clip.clip") is None
    assert len(FEATURES) > 0


def test_packages_only_export_names() -> None:
    """A package file has only imports and a docstring; importing ``drop_in`` changes ``sys.path``, which is its
    purpose, and the first import lets old names of modules work."""
    found = []
    for path in LIBRARY + DROP_IN:
        if path.name == "__init__.py" and path.parent != ADAPTERS:
            package = path.relative_to(ROOT / PACKAGE).parts[0]
            allowed = declares_a_feature if package in ("features", *SATELLITES_WITH_SETTINGS) else only_exports
            found += [f"{relative(path)}:{node.lineno}" for node in tree(path).body if not allowed(node)]
    assert found == []


def only_exports(node: ast.stmt) -> bool:
    if isinstance(node, ast.Assign):
        return ast.unparse(node.value).startswith("lazy_loader.attach_stub(")
    finds_old_names = re.fullmatch(
        r"if not TYPE_CHECKING:(\n    from megatron_core\.moved import old_names_of)?"
        r"\n    __getattr__ = old_names_of\(__name__(, __getattr__)?\)|moved\.install\(\)",
        ast.unparse(node),
    )
    return isinstance(node, (ast.Import, ast.ImportFrom)) or is_docstring(node) or finds_old_names is not None


def declares_a_feature(node: ast.stmt) -> bool:
    """Also the object ``Feature`` of a feature's package, and the list of all features."""
    is_object = isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("Feature(")
    is_list = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FEATURES"
    return is_object or is_list or only_exports(node)


def is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def test_every_config_field_has_a_docstring() -> None:
    found = []
    settings = (ROOT / PACKAGE / "features").glob("*/settings.py")
    for path in sorted([*(ROOT / PACKAGE / "config").glob("*.py"), *settings]):
        for node in nodes(path):
            if isinstance(node, ast.ClassDef) and any("dataclass" in ast.unparse(d) for d in node.decorator_list):
                followed = zip(node.body, [*node.body[1:], ast.Pass()], strict=True)
                found += [
                    f"{node.name}.{ast.unparse(field.target)}"
                    for field, after in followed
                    if isinstance(field, ast.AnnAssign) and not is_docstring(after)
                ]
    assert found == []


def test_everything_public_has_a_docstring() -> None:
    found = [f"{relative(path)}: {name}" for path in LIBRARY + DROP_IN for name in undocumented(tree(path), "")]
    assert found == []


def undocumented(parent: ast.Module | ast.ClassDef, prefix: str) -> Iterator[str]:
    """Public classes, functions and methods without a docstring."""
    for node in parent.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and not node.name.startswith("_"):
            if ast.get_docstring(node) is None:
                yield prefix + node.name
            if isinstance(node, ast.ClassDef):
                yield from undocumented(node, f"{prefix}{node.name}.")


def packages_loaded_by(statements: str) -> set[str]:
    """Top-level packages outside the standard library that a fresh process has loaded after ``statements``."""
    code = f"import sys\n{statements}\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    return set(result.stdout.split()) - sys.stdlib_module_names


def test_import_loads_little_beside_torch() -> None:
    """Importing the layers loads no tokenizers, plots or servers."""
    face = f"import {PACKAGE}\nfrom {PACKAGE} import parallel_state\nimport {PACKAGE}.tensor_parallel"
    extra = packages_loaded_by(face) - packages_loaded_by("import torch, torch.distributed, yaml, tyro")
    assert extra == {PACKAGE, "lazy_loader"}


def test_training_starts_without_slow_imports() -> None:
    """Each process of a job imports ``training``; these modules of torch take 0.3 to 1.7 s each."""
    code = f"import sys, {PACKAGE}.commands.train, {PACKAGE}.training.setup\nprint(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    slow = {
        "torch._dynamo",
        "torch.distributed.checkpoint",
        "torch.distributed.fsdp",
        "torch.distributed.tensor",
        "sympy",
    }
    assert slow & set(result.stdout.split()) == set()
