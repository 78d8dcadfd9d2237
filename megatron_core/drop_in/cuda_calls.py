"""Calls of torch's functions with a device ``cuda``, on the CPU."""

import functools
import os
import re
import sys
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")
CUDA = re.compile(r"cuda(:\d+)?")
TAKE_INDEX = (torch.device, Tensor.to, torch._C._nn._parse_to)
"""Functions whose first integer is the index of a device."""
LIBRARIES = tuple(
    str(Path(path).resolve()) + os.sep
    for path in {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")} | {Path(__file__).parents[1]}
)
"""Folders whose code is not the program: the standard library, installed packages and this package."""


class CallsOnCPU(TorchFunctionMode):
    """Replaces the device ``cuda`` in the arguments of every function of torch.

    ``cuda()`` and ``pin_memory()`` return the tensor itself; ``cpu()`` and ``to("cpu")`` in the program and in FSDP
    return a copy, as they do for a tensor on a GPU. Other threads than the current one need a mode of their own.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (Tensor.cuda, Tensor.pin_memory):
            return args[0]
        if func is Tensor.cpu or (
            func is Tensor.to and _names_cpu(kwargs.get("device", args[1] if args[1:] else None))
        ):
            found = func(*args, **kwargs)
            is_same = found.data_ptr() == args[0].data_ptr() and copies_to_cpu(sys._getframe(1).f_code.co_filename)
            return found.clone() if is_same else found
        if func is Tensor.type and args[1:]:
            args = (args[0], str(args[1]).replace("torch.cuda.", "torch.")) if isinstance(args[1], str) else args
        by_index = func in TAKE_INDEX
        args = tuple(device_on_cpu(each, by_index) if isinstance(each, KINDS) else each for each in args)
        if "device" in kwargs:
            kwargs = kwargs | {"device": device_on_cpu(kwargs["device"])}
        if kwargs.get("pin_memory"):
            kwargs = kwargs | {"pin_memory": False}
        if func is torch.device and (CPU in args or device_on_cpu(kwargs.get("type")) == CPU):
            return CPU
        return func(*args, **kwargs)


def _names_cpu(device: Any) -> bool:
    return device.type == "cpu" if isinstance(device, torch.device) else device == "cpu"


KINDS = (str, int, torch.device)
"""Classes of values that may name a device."""


def device_on_cpu(device: Any, by_index: bool = True) -> Any:
    """The CPU if ``device`` is a GPU (by name, ``torch.device`` or, with ``by_index``, number), else ``device``."""
    if isinstance(device, torch.device):
        return CPU if device.type == "cuda" else device
    if isinstance(device, str):
        return CPU if CUDA.fullmatch(device) else device
    return CPU if by_index and type(device) is int else device


@functools.cache
def in_program(path: str) -> bool:
    """Whether the source file ``path`` belongs to the program, not to ``LIBRARIES``.

    accelerate's client of Megatron-LM counts as a program: it requires a GPU and has no code for CPUs.
    """
    if Path(path).parts[-3:] == ("accelerate", "utils", "megatron_lm.py"):
        return True
    return not str(Path(path).resolve()).startswith(LIBRARIES)


@functools.cache
def copies_to_cpu(path: str) -> bool:
    """Whether code in the source file ``path`` gets a copy from ``to("cpu")``.

    FSDP frees the storage of a flat parameter after it has moved the parameter to the CPU.
    """
    return in_program(path) or Path(path).parts[-2:] == ("fsdp", "_flat_param.py")
