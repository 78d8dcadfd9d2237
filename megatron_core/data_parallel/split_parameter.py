"""Parameters whose memory is freed while ZeRO 3 keeps them in shards: reading or writing one is an error.

The tensor object keeps its shape, dtype and attributes. Its class changes when its memory is freed and when it has
been gathered, so that whole parameters cost nothing, and every operation of torch on a freed one raises ``ConfigError``
instead of reading freed memory.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from megatron_core.errors import ConfigError

READS_DATA = frozenset({"data", "T", "mT", "H", "mH", "real", "imag", "_data", "__cuda_array_interface__"})
"""Properties of a tensor that give access to its elements; all others describe it."""
DESCRIBES = frozenset(
    {
        *("size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "storage_offset", "dim_order"),
        *("is_contiguous", "is_floating_point", "is_complex", "is_signed", "is_conj", "is_neg", "is_inference"),
        *("get_device", "__len__", "is_same_size", "data_ptr", "untyped_storage", "_typed_storage", "is_shared"),
        *("register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "retain_grad", "is_pinned"),
        *("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like"),
        *("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor", "new_empty_strided", "has_names"),
        "_has_compatible_shallow_copy_type",
    }
)
"""Functions that read no elements."""
MEMORY = frozenset({"data_ptr", "untyped_storage", "_typed_storage"})
"""Functions of ``DESCRIBES`` by which files are written; they are errors for entries of ``state_dict()``."""
CONVERSIONS = frozenset({"to", "cpu", "cuda", "float", "double", "half", "bfloat16", "type", "contiguous"})
"""Methods that return the tensor itself if nothing changes."""


ACCESSES = ("__get__", "__set__")
"""Names of the functions of properties."""


def reads_elements(func: Any, args: Sequence[Any], mixin: type) -> bool:
    """Whether a function of torch reads or writes the elements of a parameter whose class has ``mixin``."""
    first = args[0] if args else None
    if func.__name__ in ACCESSES and isinstance(first, mixin):
        is_kept = func.__name__ == "__set__" and len(args) > 1 and args[1] is first
        return func.__self__.__name__ in READS_DATA and not is_kept
    return func.__name__ not in DESCRIBES


class SplitParameter:
    """Mixin for the class of a parameter whose weights are freed; see ``FreedWeights``."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a function that reads no elements; else raise ``ConfigError`` with the name of the parameter."""
        name = func.__name__
        options = dict(kwargs or {})
        first = args[0] if args else None
        if not reads_elements(func, args, SplitParameter) and not (name in MEMORY and "is_entry" in vars(first)):
            return torch._C._disabled_torch_function_impl(func, types, args, options)
        parameter: Any = next(
            (value for value in flat_values((args, options)) if isinstance(value, SplitParameter)), None
        )
        is_closed = vars(parameter)["is_closed"]
        # Without gradients nothing is kept for backward, so a read of weights that still have memory is right.
        if is_closed and not torch.is_grad_enabled():
            return torch._C._disabled_torch_function_impl(func, types, args, options)
        # ``state_dict()`` detaches all parameters; programs such as peft read its keys alone.
        if name == "detach" and not is_closed:
            return _entry(parameter)
        # Libraries call ``.to(device)`` on all parameters; without a change the elements are not needed.
        if name in CONVERSIONS and isinstance(first, Tensor) and (same := _converted(func, types, args, options)):
            return same[0]
        name = f"Tensor.{func.__self__.__name__}" if name in ACCESSES else name
        raise ConfigError(f"{_text(parameter)}; {name} needs its elements{OUTSIDE if is_closed else FIX}")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({_text(self)})"

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)


READERS = (
    "or name the class of a module that contains all modules that read it in unit_classes, or set zero3_keep_after_"
    "forward=True, or zero3_param_persistence_threshold (stage3_param_persistence_threshold) to its number of elements"
)
OUTSIDE = f" outside of its own module, and backward would read freed memory: read it under torch.no_grad(), {READERS}"
FIX = (
    ": gather it with `with engine.gathered(parameter, modify=True):` (deepspeed.zero.GatheredParameters), read all "
    f"weights with engine.full_state_dict(), {READERS}"
)


def release(flat: Tensor) -> None:
    """Free the memory of ``flat`` and of all its views; the tensor objects remain."""
    # The storage and not the tensors: every view, also those that autograd has saved, gets the memory back when it
    # returns.
    flat.untyped_storage().resize_(0)


def acquire(flat: Tensor) -> None:
    """Reallocate the memory of ``flat`` and its views."""
    flat.untyped_storage().resize_(flat.numel() * flat.element_size())


def users_of(flat: Tensor) -> int:
    """Return the number of references to the memory of ``flat``, such as its views."""
    return torch._C._storage_Use_Count(flat.untyped_storage()._cdata)


class FreedWeights:
    """The whole weights of the parameters of a flat buffer, which are freed and gathered again.

    While they are freed, ``parameter.data`` is one NaN, or the largest integer, in the shape of the parameter:
    functions that ignore the class (``torch.tensor(parameter)``) read it instead of freed memory.
    """

    def __init__(self, flat: Tensor, parameters: Sequence[nn.Parameter], names: Sequence[str], ranks: int) -> None:
        """``parameters`` are views of ``flat``; ``ranks`` keep shards of them."""
        self.flat = flat
        self._parameters = parameters
        self._views = [parameter.data for parameter in parameters]
        # One element expanded: the freed parameter keeps its shape without memory.
        self._freed = [
            parameter.data.new_full((), _unlikely(parameter)).expand(parameter.shape) for parameter in parameters
        ]
        self._users: int | None = None
        for parameter, name in zip(parameters, names, strict=True):
            vars(parameter).update(split_as=(name, ranks), is_closed=False)

    def release(self) -> Tensor:
        """Free the weights and return the flat buffer: another one if it has new users since ``count_users``."""
        # A program may keep views of gathered weights; freeing their memory would change what it holds.
        if self._users is not None and users_of(self.flat) > self._users:
            offsets = [view.storage_offset() for view in self._views]
            self.flat = torch.empty_like(self.flat)
            self._views = [
                self.flat[offset : offset + v.numel()].view_as(v)
                for offset, v in zip(offsets, self._views, strict=True)
            ]
        self._users = None
        release(self.flat)
        for parameter, freed in zip(self._parameters, self._freed, strict=True):
            vars(parameter)["is_closed"] = False
            # A class and not a flag that each operation asks: whole parameters have torch's own class and cost nothing.
            parameter.__class__ = _class_for(type(parameter))
            with torch._C.DisableTorchFunctionSubclass():
                parameter.data = freed
        return self.flat

    def close(self) -> None:
        """Refuse reads of whole weights, except without gradients, until ``restore``."""
        for parameter in self._parameters:
            vars(parameter)["is_closed"] = True
            parameter.__class__ = _class_for(type(parameter))

    def acquire(self) -> None:
        """Reallocate the weights, whose values are undefined; reading them is an error until ``restore``."""
        acquire(self.flat)

    def restore(self) -> None:
        """Allow reads of the weights."""
        for parameter, view in zip(self._parameters, self._views, strict=True):
            if isinstance(parameter, SplitParameter):
                vars(parameter)["is_closed"] = False
                parameter.__class__ = type(parameter).__mro__[2]
                parameter.data = view

    def count_users(self) -> None:
        """When the weights are freed, keep their memory if tensors created from now on still use it."""
        self._users = users_of(self.flat)


def _unlikely(parameter: Tensor) -> float:
    """NaN, or the largest integer."""
    return math.nan if parameter.is_floating_point() else torch.iinfo(parameter.dtype).max


@cache
def _class_for(parameter_class: type[Tensor]) -> Any:
    """Return the subclass of ``parameter_class`` with the mixin."""
    if issubclass(parameter_class, SplitParameter):
        return parameter_class
    meta: Any = type(parameter_class)
    return meta("SplitParameter", (SplitParameter, parameter_class), {"__module__": __name__})


def _entry(parameter: Any) -> Tensor:
    """Return a tensor that describes ``parameter``; it is an error to read its elements, also after a gather."""
    with torch._C.DisableTorchFunctionSubclass():
        entry: Tensor = parameter.detach().as_subclass(_class_for(Tensor))
    vars(entry).update(split_as=vars(parameter)["split_as"], is_closed=False, is_entry=True)
    return entry


def _text(parameter: Any) -> str:
    name, ranks = vars(parameter)["split_as"]
    where = f"split over {ranks} ranks" if ranks > 1 else "offloaded"
    return f"{name} of shape {tuple(parameter.shape)} and {parameter.dtype} is {where} by ZeRO 3"


def _converted(func: Any, types: Any, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any] | None:
    """Return the result of a conversion of ``args[0]`` that changes nothing, such as ``to`` its own device."""
    first, *others_ = args
    with torch._C.DisableTorchFunctionSubclass():
        empty = torch.empty(0, dtype=first.dtype, device=first.device)
        if not isinstance(first, SplitParameter) or any(isinstance(other, SplitParameter) for other in others_):
            return None
        result = func(empty, *others_, **options)
    if not isinstance(result, Tensor):
        return (result,)
    return (first,) if result is empty else None


def flat_values(value: Any) -> Iterable[Any]:
    """Yield the values in nested tuples, lists and mappings."""
    if isinstance(value, tuple | list):
        for inner in value:
            yield from flat_values(inner)
    elif isinstance(value, Mapping):
        yield from flat_values(list(value.values()))
    else:
        yield value
