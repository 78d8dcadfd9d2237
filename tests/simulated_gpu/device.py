"""A simulated GPU in CPU memory, for tests on machines without one.

``runtime.simulated_gpu()`` makes ``cuda`` available in this process: tensors on it are ``OnGPU``, a subclass that uses
CPU memory and torch's CPU operators. Errors and asynchronous effects of a real GPU are reproduced:

- errors: an operator over tensors of both devices (except numbers, 0-dim CPU tensors, in elementwise operations),
  a write to CPU memory other than ``copy_``, ``numpy()``, products of integers, ``cumsum`` of fractions in torch's
  deterministic mode, and collectives over CPU tensors, over strided ones or in dtypes that NCCL does not have;
- ``copy_(..., non_blocking=True)`` to pinned memory completes at the next synchronization: until then the CPU reads
  NaN there; changing a source in pinned memory before that is an error;
- outputs of an asynchronous collective are NaN until it is waited for; changing or freeing its memory is an error;
- copies in other streams: see ``streams``;
- functions of ``torch.cuda`` take the arguments of the real ones.

Each wait of the host for the device is counted in ``Log.stalls`` with its line. Not simulated: computation in streams
other than the current one, the RNG's values, memory, speed and CUDA kernels. Operators inside a Python function of
``torch`` itself count as the device's, except tensors that it creates with ``device=``.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward, saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.simulated_gpu import only_cuda

ROOT, HERE = str(Path(__file__).parents[2]), str(Path(__file__).parent)
READS = (
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
    "equal",
    "repeat_interleave",
    "bincount",
)
"""Operators whose result has a size or value for which the host waits."""
BY_ELEMENT = (
    "copy_",
    "fill_",
    "index_put_",
    "index_put",
    "masked_fill_",
    "masked_fill",
    "where",
    "_local_scalar_dense",
)
"""Operators that accept numbers of the CPU, in addition to those that torch tags as pointwise."""
WITHOUT_KERNEL = (
    *("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "resize_", "set_"),
    *("detach", "alias", "_unsafe_view", "_reshape_alias"),
)
"""Operators that only allocate memory or make a view, besides those that torch knows as views."""
PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "addmm_", "baddbmm_", "mv", "dot")


@dataclass
class Log:
    """Events on the device of this process."""

    stalls: Counter[str] = field(default_factory=Counter)
    """Waits of the host, by the line of this project and the operator."""
    index: int = 0
    """Of the current device."""
    pinned: dict[int, Tensor] = field(default_factory=dict)
    """Pinned host memory by address; kept, so that the address is not reused."""
    registered: dict[int, int] = field(default_factory=dict)
    """Bytes of registered host memory, by address."""
    allocating: list[bool] = field(default_factory=list)
    """For each registration whether it was in the main thread."""
    arriving: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Host memory and its contents after the next synchronization."""
    leaving: list[tuple[Tensor, Tensor, str]] = field(default_factory=list)
    """Host memory that is read until then, its contents, and the line."""
    streams: list[Any] = field(default_factory=list)
    """The streams other than that of the computation."""
    clock: int = 0
    """Number of results of the computation."""
    written: dict[int, int] = field(default_factory=dict)
    """When the computation allocated or wrote memory of the device last, by address."""

    posted: list[Any] = field(default_factory=list)
    """Collectives and messages that this rank has started and not yet waited for."""
    capture: Any = None
    """The CUDA graph that records, if any (``graphs``)."""
    graphs: list[Any] = field(default_factory=list)
    """All CUDA graphs."""
    calls: Counter[str] = field(default_factory=Counter)
    """Number of calls of operators that torch has only for CUDA, by name."""
    replays: int = 0
    """Number of replays of CUDA graphs."""
    launches: Counter[str] = field(default_factory=Counter)
    """Kernels that a GPU would launch, by operator: one for each operator that is neither a view nor an allocation.
    A proxy: some operators of torch launch several. Kernels of this project are counted exactly (``launches``)."""

    def mark(self, tensor: Tensor) -> None:
        """The computation writes or allocates ``tensor``."""
        self.clock += 1
        self.written[tensor.untyped_storage().data_ptr()] = self.clock

    def count_launch(self, operator: Any, name: str) -> None:
        """Count the kernel of an operator, if it has one."""
        if not (getattr(operator, "is_view", False) or name in WITHOUT_KERNEL):
            self.launches[name] += 1

    def stall(self, what: str) -> None:
        if self.capture is not None:
            raise RuntimeError(f"{line_of_project()}: {what} is not permitted when the stream is capturing")
        self.stalls[f"{line_of_project()} {what}"] += 1
        self.synchronize()

    def synchronize(self, *_: object, **__: object) -> None:
        for memory, values in self.arriving:
            memory.copy_(values)
        for memory, values, line in self.leaving:
            if not torch.equal(bytes_of(memory), bytes_of(values)):
                raise RuntimeError(f"{line}: pinned memory was changed before it had been copied to the GPU")
        self.arriving.clear()
        self.leaving.clear()

    def is_pinned(self, tensor: Tensor) -> bool:
        return not isinstance(tensor, OnGPU) and tensor.untyped_storage().data_ptr() in self.pinned


class _Frame(threading.local):
    inner = True
    """Whether C++ creates new tensors without ``device`` on the device, also in autograd's engine."""
    device = 0
    stream: Any = None
    """The current stream if it is not that of the computation."""


LOG, FRAME = Log(), _Frame()


def bytes_of(x: Tensor) -> Tensor:
    """The bytes of a tensor, also of NaN."""
    return x.contiguous().view(-1).view(torch.uint8)


def line_of_project() -> str:
    """The current line of this project, such as ``optimizer/clip.py:30``."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(ROOT) and not name.startswith(HERE) and "/.venv/" not in name:
            return f"{name[len(ROOT) + 1 :]}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


def on_host(tensor: Tensor) -> Tensor:
    """The same memory as a CPU tensor."""
    with torch._C._DisableTorchDispatch():
        return Tensor._make_subclass(Tensor, tensor)


class OnGPU(Tensor):
    """A tensor on the simulated device."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = property(lambda self: torch.device("cuda", LOG.index))  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_cpu = property(lambda self: False)  # type: ignore[assignment]

    @staticmethod
    def of(memory: Tensor) -> OnGPU:
        return Tensor._make_subclass(OnGPU, memory, memory.requires_grad)

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy it first")

    __array__ = numpy  # type: ignore[assignment]

    def tolist(self) -> Any:
        LOG.stall("tolist")
        return on_host(self).tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func.__name__.partition(".")[0]
        if func.namespace == "megatron_core":  # implemented in Python: its kernel uses the device
            with Inner():
                return func._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **kwargs)
        if name == "copy_" and not (isinstance(args[0], cls) and isinstance(args[1], cls)):
            return _copy(*args, *kwargs.values())
        if name == "_foreach_copy_" and {type(each) for each in (*args[0], *args[1])} > {cls}:
            # torch copies lists on two devices one after another.
            for to, source in zip(args[0], args[1], strict=True):
                to.copy_(source, *args[2:], **kwargs)
            return None
        found = _tensors([*args, *kwargs.values()])
        _check(func, name, found, args, kwargs)
        plain = {id(each): on_host(each) for each in found if isinstance(each, cls)}
        known = {
            id(plain.get(id(each), each)): each for each in found
        }  # tensors changed in place are returned unchanged
        memory = lambda each: plain.get(id(each), each)  # noqa: E731
        changed, operator = _traits(func, name)[0], str(func)
        func = only_cuda.FUNCTIONS.get(operator, func)
        host_args, host_kwargs = mapped(memory, args), mapped(memory, kwargs)
        if LOG.capture is not None:
            written = [each for each, is_changed in zip(host_args, changed, strict=False) if is_changed]
            for each in _tensors([*written, host_kwargs.get("out")]):
                LOG.capture.changes(each)
        result = func(*host_args, **host_kwargs)
        LOG.count_launch(func, name)
        if operator in only_cuda.FUNCTIONS:
            LOG.calls[operator] += 1
        if LOG.capture is not None:
            LOG.capture.note(func, host_args, host_kwargs, result)
        old = {each.untyped_storage().data_ptr() for each in plain.values()}
        for out in _tensors([result]):
            if id(out) in known or out.untyped_storage().data_ptr() not in old:  # changed in place, or new: no view
                LOG.mark(out)
        return mapped(lambda out: known[id(out)] if id(out) in known else cls.of(out), result)


def mapped(function: Callable[[Tensor], Any], value: Any) -> Any:
    """``value`` with ``function`` applied to its tensors."""
    if isinstance(value, Tensor):
        return function(value)
    if type(value) in (list, tuple):
        return type(value)([mapped(function, each) for each in value])
    return {key: mapped(function, each) for key, each in value.items()} if type(value) is dict else value


def _tensors(values: Any) -> list[Tensor]:
    """The tensors in lists and tuples."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif type(value) in (list, tuple):
            found += _tensors(value)
    return found


@cache
def _traits(func: Any, name: str) -> tuple[list[bool], bool]:
    """The arguments that an operator changes, and whether it accepts numbers of the CPU."""
    infos = [argument.alias_info for argument in func._schema.arguments]
    changes = [info is not None and info.is_write for info in infos]
    return changes, torch.Tag.pointwise in func.tags or name in BY_ELEMENT


def _check(func: Any, name: str, found: list[Tensor], args: Any, kwargs: Any) -> None:
    """RuntimeError for operations that a GPU refuses; count waits of the host."""
    indices = args[1] if name in ("index", "index_put", "index_put_", "_index_put_impl_") else ()
    for index in indices:
        if index is not None and (not isinstance(index, OnGPU) or index.dtype in (torch.bool, torch.uint8)):
            LOG.stall(f"{name} by {'a mask' if isinstance(index, OnGPU) else 'an index of the CPU'}")
    changes, by_element = _traits(func, name)
    for each in found:
        if isinstance(each, OnGPU) or any(each is index for index in indices):
            continue
        is_changed = any(each is value for value, change in zip(args, changes, strict=False) if change)
        if each.dim() or is_changed or not by_element:
            where = ", ".join(f"{list(tensor.shape)} on {tensor.device}" for tensor in found)
            raise RuntimeError(f"{name}: Expected all tensors to be on the same device, but found {where}")
    if name in PRODUCTS and not args[0].is_floating_point():
        raise RuntimeError(f'"{name}_cuda" not implemented for {args[0].dtype}')
    if name == "cumsum" and args[0].is_floating_point() and torch.get_deterministic_debug_mode() == 2:
        raise RuntimeError("cumsum_cuda_kernel does not have a deterministic implementation")
    of_known_size = func._overloadname == "self_int" or kwargs.get("output_size") is not None  # repeat_interleave
    if name in READS and not of_known_size:
        LOG.stall(name)


def _copy(to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """``copy_`` between the devices."""
    LOG.launches["copy"] += 1
    if LOG.capture is not None:
        raise RuntimeError(f"{line_of_project()}: a copy between host and device while the stream is capturing")
    if FRAME.stream is not None and non_blocking and LOG.is_pinned(source if isinstance(to, OnGPU) else to):
        FRAME.stream.copy(to, source)
        return to
    if isinstance(to, OnGPU):
        LOG.mark(to)
        if FRAME.stream is not None:  # written by that stream, which needs not wait for it
            LOG.written[to.untyped_storage().data_ptr()] = FRAME.stream.known
        for memory, values in LOG.arriving:  # the device works in order: earlier copies are complete
            if memory.untyped_storage().data_ptr() == source.untyped_storage().data_ptr():
                memory.copy_(values)
        on_host(to).copy_(source)
        if non_blocking and LOG.is_pinned(source):
            LOG.leaving.append((source.contiguous(), source.contiguous().clone(), line_of_project()))
        elif source.dim():
            LOG.stall("copy from pageable memory")
    elif non_blocking and LOG.is_pinned(to):
        LOG.arriving.append((to, on_host(source).to(to.dtype, copy=True)))
        to.fill_(torch.nan if to.is_floating_point() else 1)
    else:
        LOG.stall("copy to the host")
        to.copy_(on_host(source))
    return to


class _Move(torch.autograd.Function):
    """A copy on the other device."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, pinned: bool, non_blocking: bool) -> Tensor:
        ctx.to_gpu = isinstance(x, OnGPU)
        if ctx.to_gpu:
            to = torch.empty_like(on_host(x))
            if non_blocking or pinned:
                LOG.pinned[to.untyped_storage().data_ptr()] = to
        else:
            to = OnGPU.of(torch.empty_like(x))
        return _copy(to, x.detach(), non_blocking)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return OnGPU.of(grad.clone()) if ctx.to_gpu else on_host(grad).clone(), None, None


def _is_gpu(device: Any) -> bool:
    return device is not None and (isinstance(device, int) or torch.device(device).type == "cuda")


def _gradients(outputs: Any, inputs: Any, grad_outputs: Any = None, retain_graph: Any = None, **options: Any) -> Any:
    """torch.autograd.grad, which would turn off the mode of ``Factories`` in the backward of Python functions."""
    assert not any(options.get(name) for name in ("create_graph", "is_grads_batched", "materialize_grads")), options
    outputs, inputs = ([each] if isinstance(each, Tensor) else list(each) for each in (outputs, inputs))
    grads = [grad_outputs] if isinstance(grad_outputs, Tensor) else grad_outputs
    grads = [torch.ones_like(each) for each in outputs] if grads is None else list(grads)
    given = tuple(outputs), tuple(grads), bool(retain_graph), False, tuple(inputs), bool(options.get("allow_unused"))
    return _engine_run_backward(*given, accumulate_grad=False)


class Factories(TorchFunctionMode):
    """Creates tensors on ``device``."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (Tensor.to, Tensor.cpu, Tensor.cuda):
            return self._moved(func, list(args), kwargs)
        if func in (Tensor.pin_memory, Tensor.is_pinned):
            if func is Tensor.is_pinned:
                return LOG.is_pinned(args[0])
            kwargs["pin_memory"], func = True, Tensor.clone
        device, pinned = kwargs.get("device"), kwargs.pop("pin_memory", False)
        if func in (torch.Generator, torch.device) or (device is not None and torch.device(device).type == "meta"):
            return func(*args, **kwargs)
        if device is not None:
            kwargs["device"] = "cpu"
        if func is Tensor.backward:
            with self:  # otherwise off here, and so in the backward of Python functions
                kwargs["grad_tensors"] = kwargs.pop("gradient", None)
                return torch.autograd.backward(*args, **kwargs)
        if func is torch.autograd.grad:
            with self:
                return _gradients(*args, **kwargs)
        outer, FRAME.inner = FRAME.inner, device is None and any(isinstance(each, OnGPU) for each in _tensors(args))
        try:
            result = func(*args, **kwargs)
        finally:
            FRAME.inner = outer
        if isinstance(result, OnGPU) and device is not None and not _is_gpu(device):
            result = on_host(result)
        if pinned and isinstance(result, Tensor):
            if _is_gpu(device) or isinstance(result, OnGPU):
                raise RuntimeError("Only dense CPU tensors can be pinned")
            LOG.pinned[result.untyped_storage().data_ptr()] = result
        if device is None or not isinstance(result, Tensor) or _is_gpu(device) == isinstance(result, OnGPU):
            return result
        if _is_gpu(device):
            LOG.mark(result)
            if func in (torch.tensor, torch.as_tensor) and not isinstance(args[0], Tensor):
                LOG.stall(f"{func.__name__} of numbers of the host")
            LOG.count_launch(func, getattr(func, "__name__", ""))
        return OnGPU.of(result) if _is_gpu(device) else on_host(result)

    def _moved(self, func: Any, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
        x, names, target = args[0], dict(kwargs), kwargs.pop("device", None)
        rest = []
        for each in args[1:]:
            if isinstance(each, Tensor):
                rest.append(each.dtype)
                target = each.device
            elif isinstance(each, torch.device | str) or (isinstance(each, int) and not isinstance(each, bool)):
                target = each
            else:
                rest.append(each)
        target = "cpu" if func is Tensor.cpu else target or "cuda" if func is Tensor.cuda else target
        y = x if func is not Tensor.to else Tensor.to(x, *rest, **kwargs) if rest or kwargs else x
        if target is None or _is_gpu(target) == isinstance(x, OnGPU):
            return y
        flags = [each for each in rest if isinstance(each, bool)]
        return _Move.apply(y, False, names.get("non_blocking", bool(flags and flags[0])))


class Inner(TorchDispatchMode):
    """Puts new tensors that C++ creates within an operation on the operation's device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "megatron_core":
            return func(*args, **(kwargs or {}))
        kwargs = dict(kwargs or {})
        if is_there := _is_gpu(kwargs.get("device")):  # in the kernel of an operator of this project
            kwargs["device"] = "cpu"
        with torch._C.DisableTorchFunction():  # C++ operators are not Python calls
            result = func(*args, **kwargs)
        if LOG.capture is not None and not any(isinstance(each, OnGPU) for each in _tensors(args)):
            LOG.capture.note(func, args, kwargs, result)
        if not (FRAME.inner or is_there) or not isinstance(result, Tensor) or isinstance(result, OnGPU):
            return result
        if any(isinstance(each, Tensor) for each in args):
            return result
        LOG.count_launch(func, func.__name__.partition(".")[0])
        return OnGPU.of(result)


def set_hooks(self: Any, pack: Callable, unpack: Callable, real: Callable = saved_tensors_hooks.__init__) -> None:
    """Hooks of saved tensors run as regular Python, although an operator calls them."""

    def in_python(hook: Callable) -> Callable:
        def run(value: Any) -> Any:
            with Factories():
                return hook(value)

        return run

    real(self, in_python(pack), in_python(unpack))
