"""Construction of a model without memory for its parameters."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.weak import WeakIdKeyDictionary


@contextmanager
def meta_init() -> Iterator[None]:
    """Return a context in which parameters of modules are on the meta device, and buffers have their values.

    ``initialize`` gives the parameters memory and initial values, unit by unit. Each parameter has memory until it is
    registered in its module. In ``torch.device("meta")`` buffers, too, would lose their values, which cannot be
    computed again.
    """
    moved = WeakIdKeyDictionary()

    def move(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:
            return parameter
        if parameter not in moved:  # one that is registered twice stays one
            moved[parameter] = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
            vars(moved[parameter]).update(vars(parameter))
        on_meta: nn.Parameter = moved[parameter]
        return on_meta

    hook: Any = move  # torch's type says that hooks return nothing
    handle = register_module_parameter_registration_hook(hook)
    try:
        yield
    finally:
        handle.remove()
