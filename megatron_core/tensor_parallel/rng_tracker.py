"""Named random generator states, for custom layers that use torch's generator.

The layers of this package do not need them: their weights and dropout masks are functions of names and positions
(``tensor_parallel.random``). A custom layer that calls ``torch.nn.functional.dropout`` on activations that are split
over the tensor-parallel ranks needs a different generator state on each rank, which ``fork()`` provides.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from megatron_core.errors import ConfigError
from megatron_core.parallel.current import current

MODEL_PARALLEL = "model-parallel-rng"
DATA_PARALLEL = "data-parallel-rng"


def _get_state() -> Tensor:
    return torch.cuda.get_rng_state() if torch.cuda.is_available() else torch.get_rng_state()


def _set_state(state: Tensor) -> None:
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(state)
    else:
        torch.set_rng_state(state)


def _seed(seed: int) -> None:
    if torch.cuda.is_available():
        torch.cuda.manual_seed(seed)  # not the CPU's generator, which must be the same on all ranks
    else:
        torch.manual_seed(seed)


class CudaRNGStatesTracker:
    """Named states of the GPU's random generator, or of the CPU's if there is no GPU."""

    def __init__(self) -> None:
        self._states: dict[str, Tensor] = {}
        self._seeds: set[int] = set()

    def is_initialized(self) -> bool:
        """Whether any state was added."""
        return bool(self._states)

    def reset(self) -> None:
        """Remove all states."""
        self._states.clear()
        self._seeds.clear()

    def get_states(self) -> dict[str, Tensor]:
        """A copy of the states by name."""
        return dict(self._states)

    def set_states(self, states: dict[str, Tensor]) -> None:
        """Replace all states."""
        self._states = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Add a state with a new seed; ``ConfigError`` if the name or the seed is already used."""
        if name in self._states:
            raise ConfigError(f"the generator state {name!r} already exists; call reset() first, or use another name")
        if seed in self._seeds:
            raise ConfigError(f"seed={seed} is already used by another generator state; give {name!r} another seed")
        self._seeds.add(seed)
        outside = _get_state()
        _seed(seed)
        self._states[name] = _get_state()
        _set_state(outside)

    @contextmanager
    def fork(self, name: str = MODEL_PARALLEL) -> Iterator[None]:
        """Use the state ``name`` inside the context, and keep its final value for the next time."""
        if name not in self._states:
            known = ", ".join(self._states) or "none; call model_parallel_cuda_manual_seed first"
            raise ConfigError(f"there is no generator state {name!r}; known: {known}")
        outside = _get_state()
        _set_state(self._states[name])
        try:
            yield
        finally:
            self._states[name] = _get_state()
            _set_state(outside)


_TRACKER = CudaRNGStatesTracker()


def get_cuda_rng_tracker() -> CudaRNGStatesTracker:
    """The tracker of this process."""
    return _TRACKER


def model_parallel_cuda_manual_seed(seed: int, tp_rank: int | None = None) -> None:
    """Seed torch with ``seed`` and add two states: one that is equal on all TP ranks, and a different one for each.

    The numbers are Megatron Core's: ``seed`` for the first, ``seed + 2718 + tp_rank`` for the second.
    """
    tp_rank = current().index("tp") if tp_rank is None else tp_rank
    _TRACKER.reset()
    torch.manual_seed(seed)
    _TRACKER.add(DATA_PARALLEL, seed)
    _TRACKER.add(MODEL_PARALLEL, seed + 2718 + tp_rank)
