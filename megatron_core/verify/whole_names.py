"""Names of a program's modules and parameters in the whole model, without wrappers and with the layers' numbers."""

from collections.abc import Iterator, Mapping, Sequence

from torch import nn

WRAPPED = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
"""Names of the module in a wrapper of torch.compile, FSDP 1 and activation checkpointing."""
MODULE = "module"
"""The name in a wrapper of DDP, DeepSpeed and Megatron; a layer of the user may have it, too."""


def whole_modules(models: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules with their names in the whole model; a wrapper stands for the module that it wraps.

    A wrapper's output is that of its module, also where the wrapper compiles or recomputes the module.
    """
    for model in models:
        names = _Names(model)
        seen = set()
        for local, module in model.named_modules():
            name = names.whole(local) or "model"
            if name not in seen:
                seen.add(name)
                yield name, module


def parameters_of(models: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters with their names in the whole model."""
    for model in models:
        names = _Names(model)
        yield from ((names.whole(local), parameter) for local, parameter in model.named_parameters())


class _Names:
    """Names in the whole model of what is in ``model``."""

    def __init__(self, model: nn.Module) -> None:
        modules = dict(model.named_modules())
        self._wrapped = {name for name in modules if _is_wrapped(name, modules)}
        self._layers: dict[str, str] = {}  # with Megatron's numbers, by their names in this model
        for local, module in modules.items():
            name = self._without_wrappers(local)
            number = getattr(module, "layer_number", None)
            head, _, final = name.rpartition(".")
            if isinstance(number, int) and final.isdigit():
                self._layers[name] = f"{head}.{number - 1}"

    def whole(self, local: str) -> str:
        name = self._without_wrappers(local)
        for layer, full_name in self._layers.items():
            if name == layer or name.startswith(f"{layer}."):
                return full_name + name[len(layer) :]
        return name

    def _without_wrappers(self, local: str) -> str:
        labels = local.split(".")
        heads = (".".join(labels[: number + 1]) for number in range(len(labels)))
        return ".".join(label for label, head in zip(labels, heads, strict=True) if head not in self._wrapped)


def _is_wrapped(name: str, modules: Mapping[str, nn.Module]) -> bool:
    """Whether a wrapper holds the module ``name``."""
    outer, _, final = name.rpartition(".")
    if final in WRAPPED:
        return True
    if final != MODULE:
        return False
    alone = len(list(modules[outer].children())) == 1 and not list(modules[outer].parameters(recurse=False))
    return not outer or alone
