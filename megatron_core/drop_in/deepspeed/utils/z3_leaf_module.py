"""Marks of modules that ZeRO 3 gathers as a whole; here whole layers are gathered in any case."""

from collections.abc import Sequence

from torch import nn


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether ``model`` is marked."""
    return getattr(model, "_z3_leaf", False)


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Set or remove the mark of one module."""
    model._z3_leaf = flag  # type: ignore[assignment]


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Return the marked modules."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark all modules of the given classes; ``ValueError`` if there is none."""
    return _mark(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Remove the marks of all modules of the given classes; ``ValueError`` if there is none."""
    return _mark(model, leaf_module_classes, False, raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark the modules of these names; return (modules, names that no module has), ``ValueError`` for such names."""
    named = dict(model.named_modules())
    missing = [name for name in module_names if name not in named]
    if missing and raise_if_not_found:
        raise ValueError(f"module_names={missing}: the model has no such modules")
    return _set_all([named[name] for name in module_names if name in named], flag), missing


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark modules whose names end so; return (modules, ends that no name has), ``ValueError`` for such ends."""
    found = {end: [m for name, m in model.named_modules() if name.endswith(end)] for end in module_name_suffixes}
    missing = [end for end, modules in found.items() if not modules]
    if missing and raise_if_not_found:
        raise ValueError(f"module_name_suffixes={missing}: no names of modules end so")
    return _set_all(list(dict.fromkeys(module for modules in found.values() for module in modules)), flag), missing


def _set_all(modules: list[nn.Module], flag: bool) -> list[nn.Module]:
    for module in modules:
        set_z3_leaf_module(module, flag)
    return modules


def _mark(model: nn.Module, classes: Sequence[type[nn.Module] | str], flag: bool, must_exist: bool) -> list[nn.Module]:
    found = [
        module
        for module in model.modules()
        if any(each in _names(module) if isinstance(each, str) else isinstance(module, each) for each in classes)
    ]
    if not found and must_exist:
        raise ValueError(f"leaf_module_classes={list(classes)}: the model has no such modules")
    return _set_all(found, flag)


def _names(module: nn.Module) -> tuple[str, str]:
    """Return the name of a module's class, without and with the module of the class."""
    kind = type(module)
    return kind.__name__, f"{kind.__module__}.{kind.__qualname__}"
