"""``deepspeed.checkpointing``: recompute activations in backward, with torch's non-reentrant checkpoint."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from deepspeed.accelerator import get_accelerator
from deepspeed.translation import read_json
from megatron_core.errors import ConfigError
from megatron_core.features.offload.transfer import empty_on_host, is_on_host

_MODEL_PARALLEL_RNG_TRACKER_NAME = "model-parallel-rng"


@dataclass
class _Options:
    is_configured: bool = False
    in_host_memory: bool = False
    """``cpu_checkpointing``: keep the inputs in host memory."""
    num_checkpoints: int | None = None


@cache
def _options() -> _Options:
    """The options of this process."""
    return _Options()


def configure(
    mpu_: Any,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Set options from the section ``activation_checkpointing`` of a JSON and from arguments, which come first.

    ``cpu_checkpointing`` keeps inputs in host memory. The other options have no effect: a model here is not split by
    ``mpu_``, and inputs need no buffers.
    """
    section: Any = {}
    if deepspeed_config is not None:
        values = getattr(deepspeed_config, "_param_dict", deepspeed_config)
        section = read_json(values).get("activation_checkpointing") or {}
    if not isinstance(section, Mapping):
        raise ConfigError(f"activation_checkpointing={section!r} must be an object {{...}}")
    given = section.get("cpu_checkpointing", False) if checkpoint_in_cpu is None else checkpoint_in_cpu
    options = _options()
    options.is_configured, options.in_host_memory = True, bool(given)
    options.num_checkpoints = num_checkpoints or section.get("number_checkpoints")


def is_configured() -> bool:
    """Whether ``configure`` was called."""
    return _options().is_configured


def reset() -> None:
    """Forget nothing: no buffers are kept between steps."""


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Return ``function(*args)``; backward computes its activations again, with the same random numbers."""
    if not _options().in_host_memory:
        return torch_checkpoint(function, *args, use_reentrant=False)
    with _host_memory(args):
        return torch_checkpoint(function, *args, use_reentrant=False)


def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """As ``checkpoint``."""
    return checkpoint(function, *args)


class CheckpointFunction:
    """Recomputation under the name that programs call ``apply`` of."""

    @staticmethod
    def apply(function: Callable[..., Any], all_outputs: list[Any], *args: Any) -> None:
        """Append the outputs of ``checkpoint(function, *args)`` to ``all_outputs``."""
        found = checkpoint(function, *args)
        all_outputs += [found] if isinstance(found, torch.Tensor) else list(found)


def _host_memory(args: tuple[Any, ...]) -> AbstractContextManager[Any]:
    """Keep the inputs on the host until backward."""
    inputs = {id(each) for each in args if isinstance(each, torch.Tensor) and not is_on_host(each)}
    if not inputs:
        return nullcontext()

    def pack(tensor: torch.Tensor) -> tuple[torch.device, torch.Tensor]:
        kept = empty_on_host(tensor).copy_(tensor, non_blocking=True) if id(tensor) in inputs else tensor
        return tensor.device, kept

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed[1].to(packed[0], non_blocking=True))


class CudaRNGStatesTracker:
    """Named states of the device's random generator."""

    def __init__(self) -> None:
        self.states_: dict[str, torch.Tensor] = {}
        self.seeds_: set[int] = set()

    def reset(self) -> None:
        """Forget all states."""
        self.__init__()  # type: ignore[misc]

    def get_states(self) -> dict[str, torch.Tensor]:
        """Return a copy of the states."""
        return dict(self.states_)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        """Replace the states."""
        self.states_ = states

    def add(self, name: str, seed: int) -> None:
        """Add the state of a generator with ``seed``."""
        if seed in self.seeds_ or name in self.states_:
            raise ValueError(f"seed {seed} or rng state {name} already exists")
        self.seeds_.add(seed)
        device = get_accelerator()
        before = device.get_rng_state()
        device.manual_seed(seed)
        self.states_[name] = device.get_rng_state()
        device.set_rng_state(before)

    @contextmanager
    def fork(self, name: str = _MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
        """Return a context with the state ``name``."""
        if name not in self.states_:
            raise ValueError(f"rng state {name} is not added")
        device = get_accelerator()
        before = device.get_rng_state()
        device.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = device.get_rng_state()
            device.set_rng_state(before)


_CUDA_RNG_STATE_TRACKER = CudaRNGStatesTracker()


def get_cuda_rng_tracker() -> CudaRNGStatesTracker:
    """Return the tracker of this process."""
    return _CUDA_RNG_STATE_TRACKER


def _set_cuda_rng_state(new_state: torch.Tensor, device: int = -1) -> None:
    """Set the state of the random generator of the current device."""
    get_accelerator().set_rng_state(new_state)


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the device's generator, and the state of model-parallel regions with ``seed`` + 2718."""
    tracker = get_cuda_rng_tracker()
    tracker.reset()
    get_accelerator().manual_seed(seed)
    tracker.add(_MODEL_PARALLEL_RNG_TRACKER_NAME, seed + 2718)


model_parallel_reconfigure_tp_seed = model_parallel_cuda_manual_seed
