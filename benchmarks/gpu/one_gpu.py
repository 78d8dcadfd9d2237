"""Several ranks on one GPU: collectives and messages over copies in host memory.

NCCL refuses two ranks on one GPU, so that code for several ranks would not run on a machine with a single one. Here
each collective copies its inputs to the host, runs between CPU ranks (shared memory, or gloo), and copies its outputs
back when it is waited for. Everything else is the code of a run over NCCL: tensors on the device, asynchronous handles,
groups that say they are NCCL's. Slow, and no measure of a network.

    run_ranks(2, on_one_gpu, function, *arguments)    # forked: the parent must not have used CUDA
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_core import parallel_state

WRITTEN = {
    **dict.fromkeys(("all_reduce", "broadcast", "reduce", "scatter", "irecv", "recv"), 0),
    **dict.fromkeys(
        ("all_gather", "all_gather_into_tensor", "all_gather_single", "all_to_all_single", "all_to_all"), 0
    ),
    **dict.fromkeys(("reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single"), 0),
    "gather": 1,
    "isend": None,
    "send": None,
}
"""The index of the argument that each collective writes."""
IN_PLACE = ("all_reduce", "broadcast", "reduce")
"""Collectives that also read it."""
REAL = {name: getattr(dist, name) for name in WRITTEN if hasattr(dist, name)}
"""The functions of torch, before any of them is replaced."""
DEVICE: Callable[[], AbstractContextManager[Any]] = nullcontext
"""The context that a rank enters first; the tests simulate a GPU here."""


class Arriving:
    """The handle of an asynchronous collective: ``wait`` copies its outputs to the device."""

    def __init__(self, work: Any, pairs: list[tuple[Tensor, Tensor]]) -> None:
        self._work = work
        self._pairs = pairs

    def wait(self, timeout: Any = None) -> bool:
        """Wait on the host; the copies are in the current stream, as the outputs of NCCL are."""
        self._work.wait()
        for output, copy in self._pairs:
            output.copy_(copy)
        self._pairs = []
        return True

    def is_completed(self) -> bool:
        """Whether ``wait`` would not block."""
        return bool(self._work.is_completed())


def _mapped(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    return [_mapped(function, element) for element in value] if type(value) in (list, tuple) else value


def _flat(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for element in value for tensor in _flat(element)] if type(value) in (list, tuple) else []


def _over_host(name: str) -> Callable[..., Any]:
    """A collective of torch over copies in host memory; over CPU tensors it is torch's."""
    real = REAL[name]
    signature = inspect.signature(real)
    index = WRITTEN[name]
    written = None if index is None else list(signature.parameters)[index]

    def collective(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments
        if not any(tensor.is_cuda for value in arguments.values() for tensor in _flat(value)):
            return real(*args, **kwargs)
        outputs = _flat(arguments.get(written)) if written else []
        reads = name in IN_PLACE
        on_host = {
            key: _mapped(lambda tensor: _to_host(tensor, copies=reads), value)
            if key == written
            else _mapped(lambda tensor: _to_host(tensor, copies=True), value)
            for key, value in arguments.items()
        }
        work = _plain(real, on_host)
        pairs = list(zip(outputs, _flat(on_host.get(written)) if written else [], strict=True))
        if name in ("isend", "irecv") or arguments.get("async_op"):
            return Arriving(work, pairs)
        for output, copy in pairs:
            output.copy_(copy)
        return work

    collective.__name__ = name
    return collective


def _to_host(tensor: Tensor, *, copies: bool) -> Tensor:
    on_host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    # A copy to pageable memory waits for the stream that computes the input.
    return on_host.copy_(tensor.detach()) if copies else on_host


def _plain(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    # The simulated GPU of the tests creates tensors of torch's own functions on the device.
    with torch._C.DisableTorchFunction():
        return function(**arguments)


def _holders(function: Callable[..., Any]) -> Iterator[tuple[ModuleType, str]]:
    """The modules of this project that have a name of their own for a function of torch."""
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("megatron_core"):
            yield from ((module, key) for key, value in list(vars(module).items()) if value is function)


@contextmanager
def over_host_memory() -> Iterator[None]:
    """Let torch.distributed take tensors of the GPU in groups of CPU ranks, and say that it is NCCL."""
    patches = [mock.patch.object(dist, "get_backend", lambda group=None: "nccl")]
    for name, real in REAL.items():
        collective = _over_host(name)
        patches += [mock.patch.object(module, name, collective) for module in (dist, dist.distributed_c10d)]
        patches += [mock.patch.object(module, key, collective) for module, key in _holders(real)]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in reversed(patches):
            patch.stop()


def on_one_gpu(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call ``function(*arguments)`` in a forked rank, with GPU 0 as its device."""
    if torch.cuda._is_in_bad_fork():
        raise RuntimeError("the process that forked the ranks had used CUDA; fork before the first use of the GPU")
    parallel_state.destroy_model_parallel()
    with DEVICE(), over_host_memory():
        torch.cuda.set_device(0)
        return function(*arguments)
