"""``get_accelerator``: one interface to ``torch.cuda`` and ``torch.cpu``."""

import os
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import torch

from megatron_core.launcher import read_integer
from megatron_core.monitor.device import current_memory_bytes, peak_memory_bytes, total_memory_bytes


class Accelerator:
    """The device of this process; names that are not defined here are those of ``torch.cuda`` or ``torch.cpu``."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._module: ModuleType = torch.cuda if name == "cuda" else torch.cpu
        self._communication_backend_name = "nccl" if name == "cuda" else "gloo"

    def __getattr__(self, name: str) -> Any:
        is_of_torch = self._name == "cpu" and (name.endswith("Tensor") or name == "initial_seed")
        return getattr(torch if is_of_torch else self._module, name)

    def device_name(self, device_index: int | None = None) -> str:
        """Return ``cpu``, ``cuda``, or ``cuda:N``."""
        return self._name if self._name == "cpu" or device_index is None else f"{self._name}:{device_index}"

    def device(self, device_index: int | None = None) -> Any:
        """Return a context in which the device is current."""
        return torch.cuda.device(device_index) if self._name == "cuda" else torch.device("cpu")

    def current_device(self) -> Any:
        """Return the index of the current GPU, or ``cpu``."""
        return torch.cuda.current_device() if self._name == "cuda" else "cpu"

    def current_device_name(self) -> str:
        """Return ``cpu`` or ``cuda:N``."""
        return f"cuda:{torch.cuda.current_device()}" if self._name == "cuda" else "cpu"

    def set_device(self, device_index: Any) -> None:
        """Choose the current GPU."""
        if self._name == "cuda":
            torch.cuda.set_device(device_index)

    def device_count(self) -> int:
        """Return the number of GPUs, or on CPUs the number of ranks of this host, which the launcher sets."""
        if self._name == "cuda":
            return torch.cuda.device_count()
        return read_integer("LOCAL_WORLD_SIZE", read_integer("LOCAL_SIZE", 1, least=1), least=1)

    def get_op_builder(self, class_name: str) -> Any:
        """Return a class of ``deepspeed.ops.op_builder``; None if it has no such name."""
        from deepspeed.ops.op_builder import builder

        return getattr(builder, class_name, None)

    def is_available(self) -> bool:
        """Return True."""
        return True

    def is_synchronized_device(self) -> bool:
        """Whether operations end before their call returns."""
        return self._name == "cpu"

    def communication_backend_name(self) -> str:
        """Return the backend of torch.distributed for this device."""
        return self._communication_backend_name

    def is_bf16_supported(self) -> bool:
        """Whether the device computes in bfloat16."""
        return self._name == "cpu" or torch.cuda.is_bf16_supported()

    def is_fp16_supported(self) -> bool:
        """Whether the device computes in float16."""
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        """Return the floating-point dtypes of the device."""
        return [torch.float32, torch.float16, *([torch.bfloat16] if self.is_bf16_supported() else [])]

    def preferred_dtype(self) -> torch.dtype:
        """Return bfloat16 if it is supported, else float16."""
        return torch.bfloat16 if self.is_bf16_supported() else torch.float16

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        """Return ``tensor`` in page-locked memory; on a CPU itself."""
        return tensor.pin_memory() if self._name == "cuda" else tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is in page-locked memory."""
        return self._name == "cuda" and tensor.is_pinned()

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is on this kind of device."""
        return tensor.device.type == self._name

    def manual_seed(self, seed: int) -> Any:
        """Seed the generator of the device."""
        return torch.cuda.manual_seed(seed) if self._name == "cuda" else torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> Any:
        """Seed the generators of all devices."""
        return torch.cuda.manual_seed_all(seed) if self._name == "cuda" else torch.manual_seed(seed)

    def random(self) -> ModuleType:
        """Return ``torch.random``."""
        return torch.random

    def default_generator(self, device_index: int) -> torch.Generator:
        """Return the random generator of a device."""
        return torch.cuda.default_generators[device_index] if self._name == "cuda" else torch.default_generator

    def lazy_call(self, callback: Callable[[], object]) -> object:
        """Call ``callback`` when the device is initialized."""
        return torch.cuda._lazy_call(callback) if self._name == "cuda" else callback()

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        """Return the state of the device's generator."""
        if self._name == "cuda":
            return torch.cuda.get_rng_state("cuda" if device_index is None else device_index)
        return torch.get_rng_state()

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        """Set the state of the device's generator."""
        if self._name == "cuda":
            torch.cuda.set_rng_state(new_state, "cuda" if device_index is None else device_index)
        else:
            torch.set_rng_state(new_state)

    def empty_cache(self) -> None:
        """Return unused memory of the allocator to the GPU."""
        if self._name == "cuda":
            torch.cuda.empty_cache()

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Return the bytes of tensors on the GPU, or of the process."""
        return current_memory_bytes()

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """Return the peak of ``memory_allocated``."""
        return peak_memory_bytes()

    def total_memory(self, device_index: int | None = None) -> int:
        """Return the bytes of the device."""
        return total_memory_bytes()

    memory_reserved = memory_cached = memory_allocated
    max_memory_reserved = max_memory_cached = max_memory_allocated

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Start a new peak; the peak of a process on a CPU cannot be reset."""
        if self._name == "cuda":
            torch.cuda.reset_peak_memory_stats()

    reset_max_memory_allocated = reset_max_memory_cached = reset_peak_memory_stats

    def range_push(self, msg: str) -> None:
        """Begin a range in a GPU profile."""
        if self._name == "cuda":
            torch.cuda.nvtx.range_push(msg)

    def range_pop(self) -> None:
        """End a range in a GPU profile."""
        if self._name == "cuda":
            torch.cuda.nvtx.range_pop()


@cache
def get_accelerator() -> Accelerator:
    """Return the GPU if torch sees one, else the CPU."""
    return Accelerator("cuda" if torch.cuda.is_available() else "cpu")


def is_current_accelerator_supported() -> bool:
    """Return True."""
    return True
