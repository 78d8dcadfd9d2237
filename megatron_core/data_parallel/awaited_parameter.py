"""Parameters whose weights arrive in the background: an operation that reads one waits for them.

Hooks of data parallelism wait when a module is called. Other code reads weights, too: a module may use those of a child
that is never called, or of a layer that is called later. As for freed weights (``split_parameter``), the class of the
parameters changes in the meantime, so that parameters that have arrived cost nothing.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

from megatron_core.data_parallel.split_parameter import flat_values, reads_elements
from megatron_core.parallel.handles import Handle

READS_MEMORY = frozenset({"data_ptr", "untyped_storage", "_typed_storage"})
"""Functions that pass the memory to kernels outside of torch, such as those of Triton."""


@dataclass(frozen=True)
class Arrival:
    """The handle of a gather with further actions, such as allowing reads of the weights."""

    gathering: Any
    then: Callable[[], None] = lambda: None
    before: Callable[[], None] = lambda: None

    def wait(self) -> None:
        """Run the action ``before``, wait for the gather, and run the action ``then``."""
        self.before()
        self.gathering.wait()
        self.then()


class AwaitedParameter:
    """Mixin for the class of a parameter whose weights arrive; see ``await_reads``."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Wait for the weights if the function reads elements, and run it."""
        options = dict(kwargs or {})
        # Shapes and devices are asked far more often than elements, and must not wait.
        if not reads_elements(func, args, AwaitedParameter) and func.__name__ not in READS_MEMORY:
            return torch._C._disabled_torch_function_impl(func, types, args, options)
        for value in flat_values((args, options)):
            if isinstance(value, AwaitedParameter):
                finish = vars(value).pop("finish_gather", None)
                if finish is None:  # a copy of such a parameter
                    _end((value,))
                else:
                    finish()
        return func(*args, **options)


def await_reads(parameters: Sequence[nn.Parameter], gathering: Handle | Any, finish: Callable[[], None]) -> Arrival:
    """Let operations that read ``parameters`` call ``finish``, which waits for the returned handle."""
    for parameter in parameters:
        if not isinstance(parameter, AwaitedParameter):
            parameter.__class__ = _class_for(type(parameter))
        vars(parameter)["finish_gather"] = finish
    return Arrival(gathering, lambda: _end(parameters))


def _end(parameters: Iterable[Any]) -> None:
    for parameter in parameters:
        if isinstance(parameter, AwaitedParameter):
            # The class before the mixin was added; the object, which hooks and optimizers refer to, stays the same.
            parameter.__class__ = type(parameter).__mro__[2]
            vars(parameter).pop("finish_gather", None)


@cache
def _class_for(parameter_class: type[nn.Parameter]) -> Any:
    """Return the subclass of ``parameter_class`` with the mixin."""
    meta: Any = type(parameter_class)
    return meta("AwaitedParameter", (AwaitedParameter, parameter_class), {"__module__": __name__})
