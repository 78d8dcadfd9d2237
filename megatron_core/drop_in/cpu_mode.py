"""``python -m megatron_core.drop_in --cpu``: run a program that asks for GPUs on the CPU.

``emulate_cuda`` is called when the program, or an interpreter that it starts, imports torch (``cpu_start``). Then

- tensors and modules that go to ``cuda`` stay in CPU memory (``cuda_calls``),
- ``torch.cuda`` describes a device that is the CPU (``cuda_names``),
- process groups use gloo.

Names without a counterpart on a CPU, such as CUDA graphs, raise ``NotImplementedError`` with a sentence.
"""

import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed
from torch import distributed
from torch.distributed import device_mesh

from megatron_core.drop_in import cuda_names
from megatron_core.drop_in.after_import import run_after_import
from megatron_core.drop_in.cuda_calls import CallsOnCPU, device_on_cpu

AVERAGE = (
    "ReduceOp.AVG with async_op=True does not exist on gloo; with --cpu, wait for the collective or use ReduceOp.SUM"
)


@functools.cache  # a child may be asked twice, by its parent and by its own --cpu
def emulate_cuda(devices: int) -> None:
    """Let every request for a GPU in this process resolve to the CPU, which it sees as ``devices`` GPUs."""
    cuda_names.install(devices)
    _patch_devices()
    _patch_process_groups()
    _patch_threads()
    run_after_import("torch.distributed.fsdp._flat_param", _patch_fsdp)
    run_after_import("torch.distributed.fsdp._init_utils", _let_fsdp_send_weights)
    CallsOnCPU().__enter__()


def changed(owner: Any, name: str, change: Callable[[dict[str, Any]], None]) -> None:
    """Let ``change`` edit the named arguments of each call of the function ``owner.name``."""
    function = getattr(owner, name)
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        change(bound.arguments)
        return function(*bound.args, **bound.kwargs)

    setattr(owner, name, call)


def _patch_devices() -> None:
    """Classes and functions that read the name of a device without a call of an operator."""

    def load(given: dict[str, Any]) -> None:
        location = given.get("map_location")
        given["map_location"] = "cpu" if location is None else device_on_cpu(location)

    def type_of_device(name: str) -> Callable[[dict[str, Any]], None]:
        def change(given: dict[str, Any]) -> None:
            if name in given:
                given[name] = str(device_on_cpu(given[name]))

        return change

    def anywhere(given: dict[str, Any]) -> None:
        given.pop("device_ids", None)
        given.pop("output_device", None)

    def autocast(given: dict[str, Any]) -> None:
        if given.get("device_type") == "cuda" and given.get("dtype") is None:
            given["dtype"] = torch.float16  # the default of GPUs; that of a CPU is bfloat16
        type_of_device("device_type")(given)

    changed(torch, "load", load)
    changed(torch.nn.parallel.DistributedDataParallel, "__init__", anywhere)
    changed(torch.autocast, "__init__", autocast)
    changed(torch.amp.GradScaler, "__init__", lambda given: given.update(device="cpu"))
    changed(device_mesh.DeviceMesh, "__init__", type_of_device("device_type"))
    changed(device_mesh, "init_device_mesh", type_of_device("device_type"))
    distributed.init_device_mesh = device_mesh.init_device_mesh


def _patch_process_groups() -> None:
    """Groups of gloo, whichever backend is requested."""

    def on_gloo(given: dict[str, Any]) -> None:
        given["backend"] = "gloo"
        given.pop("device_id", None)
        given.pop("pg_options", None)

    changed(distributed, "init_process_group", on_gloo)
    changed(distributed, "new_group", on_gloo)
    changed(distributed, "barrier", lambda given: given.update(device_ids=None))
    for name in ("all_reduce", "reduce_scatter_tensor"):
        setattr(distributed, name, averaging(getattr(distributed, name)))


def averaging(collective: Callable[..., Any]) -> Callable[..., Any]:
    """``collective`` with ``ReduceOp.AVG``, which gloo lacks, as a sum that is divided by the size of the group."""
    signature = inspect.signature(collective)

    @functools.wraps(collective)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        given = bound.arguments
        if given.get("op") != distributed.ReduceOp.AVG:
            return collective(*args, **kwargs)
        if given.get("async_op"):
            raise NotImplementedError(AVERAGE)
        given["op"] = distributed.ReduceOp.SUM
        result = collective(*bound.args, **bound.kwargs)
        output = given["tensor"] if "tensor" in given else given["output"]
        output.div_(
            distributed.get_world_size(given.get("group")),
            rounding_mode=None if output.is_floating_point() or output.is_complex() else "trunc",
        )
        return result

    return call


def _patch_fsdp() -> None:
    """Let FSDP see that a gradient that it offloads is on another device than the weights that it gathers.

    It compares their devices, and would add the gradient of the last step to that of the next one if they were equal.
    """
    from torch.distributed.fsdp._flat_param import FlatParamHandle

    prepare = FlatParamHandle.prepare_gradient_for_backward

    @functools.wraps(prepare)
    def prepare_gradient_for_backward(self: Any) -> None:
        prepare(self)
        if self._offload_params and hasattr(self.flat_param, "_saved_grad_shard"):
            del self.flat_param._saved_grad_shard

    setattr(FlatParamHandle, "prepare_gradient_for_backward", prepare_gradient_for_backward)  # noqa: B010


def _let_fsdp_send_weights() -> None:
    """Accept ``sync_module_states`` for a module in CPU memory: gloo broadcasts from there."""
    from torch.distributed.fsdp import _init_utils

    _init_utils._check_module_states_for_sync_module_states = lambda module_states: None


def _patch_threads() -> None:
    """Enter the mode in each thread, because a mode belongs to one."""
    bootstrap = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]  # calls run, which subclasses replace

    def on_cpu(self: threading.Thread) -> None:
        with CallsOnCPU():
            bootstrap(self)

    setattr(threading.Thread, "_bootstrap_inner", on_cpu)  # noqa: B010
