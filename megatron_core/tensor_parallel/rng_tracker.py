"""Named generator states, for layers of one's own that draw from torch's generator.

This package's own layers do not need them: their weights and dropout masks are functions of names and coordinates
(``tensor_parallel.random``). A layer that calls ``torch.nn.functional.dropout`` on activations that are split over the
tensor-parallel ranks has to draw from another stream on each rank; inside ``fork()`` it does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from megatron_core import parallel_state
from megatron_core.errors import ConfigError

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
        torch.cuda.manual_seed(seed)  # and not the CPU's generator, from which all ranks draw the same weights
    else:
        torch.manual_seed(seed)


class CudaRNGStatesTracker:
    """States of the device's generator by name (the CPU's where there is no GPU)."""

    def __init__(self) -> None:
        self._states: dict[str, Tensor] = {}
        self._seeds: set[int] = set()

    def is_initialized(self) -> bool:
        """Whether any state was added."""
        return bool(self._states)

    def reset(self) -> None:
        """Forget all states."""
        self._states.clear()
        self._seeds.clear()

    def get_states(self) -> dict[str, Tensor]:
        """A copy of the table of states."""
        return dict(self._states)

    def set_states(self, states: dict[str, Tensor]) -> None:
        """Replace the table of states."""
        self._states = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Start a stream; two streams may share neither name nor seed."""
        if name in self._states:
            raise ConfigError(f"the generator state {name!r} exists already; call reset() first, or use another name")
        if seed in self._seeds:
            raise ConfigError(f"seed {seed} has a generator state already; give {name!r} another seed")
        self._seeds.add(seed)
        outside = _get_state()
        _seed(seed)
        self._states[name] = _get_state()
        _set_state(outside)

    @contextmanager
    def fork(self, name: str = MODEL_PARALLEL) -> Iterator[None]:
        """Draw from the stream ``name`` inside the context; the stream goes on where it was left."""
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
    """The process's one tracker."""
    return _TRACKER


def model_parallel_cuda_manual_seed(seed: int, tp_rank: int | None = None) -> None:
    """Seed torch with ``seed`` and start two streams: one that data-parallel ranks share, and one for each TP rank.

    The numbers are Megatron Core's: ``seed`` for the first, ``seed + 2718 + tp_rank`` for the second.
    """
    tp_rank = parallel_state.get_tensor_model_parallel_rank() if tp_rank is None else tp_rank
    _TRACKER.reset()
    torch.manual_seed(seed)
    _TRACKER.add(DATA_PARALLEL, seed)
    _TRACKER.add(MODEL_PARALLEL, seed + 2718 + tp_rank)
