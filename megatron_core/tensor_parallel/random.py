"""Randomness: keyed dropout without generator state, and named generator states for custom layers.

The mask of ``KeyedDropout`` is a pure function of (seed, module, sample, position, channel), which
``megatron_core.ops.reference`` defines. It uses no random number generator. Therefore the layout, the number of
micro-batches, recomputation and resuming cannot change the mask, and there is no state to save.

A custom layer that calls ``torch.nn.functional.dropout`` on activations that are split over the tensor-parallel ranks
needs a different generator state on each rank, which ``CudaRNGStatesTracker.fork()`` provides.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import torch
import torch.utils.checkpoint
from torch import Tensor

from megatron_core.errors import ConfigError
from megatron_core.ops import Backend, bias_dropout_add
from megatron_core.parallel.current import current
from megatron_core.parallel.initialization import name_seed
from megatron_core.parallel.rank_local import Forwarding, RankLocal

MODEL_PARALLEL = "model-parallel-rng"
DATA_PARALLEL = "data-parallel-rng"
EXPERT_PARALLEL = "expert-parallel-rng"
DEFAULT_SEED = 1234


class KeyedDropout(torch.nn.Module):
    """x -> residual + keep (x + bias) / (1 - p), where keep is 0 or 1 for each element.

    ``p`` is the probability of 0; ``name`` identifies the dropout in the model (such as ``layers.3.attention``).
    """

    def __init__(self, p: float, seed: int, name: str, backend: Backend = "auto") -> None:
        super().__init__()
        self.p = p
        # By name and not by a counter, so that the mask does not depend on how many layers a stage has.
        self.key = name_seed(seed, f"dropout:{name}")
        self.backend = backend

    @property
    def active(self) -> bool:
        """Whether anything is dropped: in training with p > 0."""
        return self.training and self.p > 0.0

    def forward(
        self,
        x: Tensor,
        sample_index: Tensor | None,
        *,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        position_ids: Tensor | None = None,
        key_positions: Tensor | None = None,
        first_head: int = 0,
    ) -> Tensor:
        """Drop elements of ``x``: activations ``[s, b, h]``, or attention weights ``[b, heads, s, t]`` whose first head
        is ``first_head``. ``sample_index`` ``[b]`` holds the global numbers of the sequences.

        ``position_ids`` ``[s]`` or ``[b, s]`` are the global positions of the rows, ``key_positions`` ``[t]`` those of
        the keys, both int64; None means 0, 1, 2, .... ``bias`` and ``residual`` are added even if dropout is off.
        """
        p = self.p if self.active else 0.0
        numbers = (sample_index, position_ids, key_positions, first_head)
        return bias_dropout_add(x, bias, residual, p, self.key, *numbers, backend=self.backend)


def _get_state() -> Tensor:
    return torch.cuda.get_rng_state() if torch.cuda.is_available() else torch.get_rng_state()


def _set_state(state: Tensor | torch.Generator) -> None:
    state = state.get_state() if isinstance(state, torch.Generator) else state
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
    """Named states of the GPU's random generator, or of the CPU's if there is no GPU.

    ``use_cudagraphable_rng`` and ``is_inference_rng_tracker`` have no effect.
    """

    def __init__(self, use_cudagraphable_rng: bool = False, is_inference_rng_tracker: bool = False) -> None:
        self.seed = DEFAULT_SEED
        """The last seed of ``model_parallel_cuda_manual_seed``."""
        self.states_: dict[str, Tensor] = {}
        """States by name, Megatron's attribute; of an active ``fork`` only ``get_states`` has the current one."""
        self._seeds: set[int] = set()
        self.forks: list[str] = []
        """Names of the states in use by ``fork``, outermost first."""

    def is_initialized(self) -> bool:
        """Whether any state was added."""
        return bool(self.states_)

    def reset(self) -> None:
        """Remove all states."""
        self.states_.clear()
        self._seeds.clear()

    def get_states(self) -> dict[str, Tensor]:
        """A copy of the states by name, including the current one of an active ``fork``."""
        self._store_state_in_use()
        return dict(self.states_)

    def _store_state_in_use(self) -> None:
        if self.forks:
            self.states_[self.forks[-1]] = _get_state()

    def set_states(self, states: dict[str, Tensor]) -> None:
        """Replace all states."""
        self.states_ = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Add a state with a new seed; ``ConfigError`` if the name or the seed is already used."""
        if name in self.states_:
            raise ConfigError(f"the generator state {name!r} already exists; call reset() first, or use another name")
        # Equal seeds would give two states with the same numbers, such as equal masks on ranks that need different
        # ones.
        if seed in self._seeds:
            raise ConfigError(f"seed={seed} is already used by another generator state; give {name!r} another seed")
        self._seeds.add(seed)
        outside = _get_state()
        _seed(seed)
        self.states_[name] = _get_state()
        _set_state(outside)

    @contextmanager
    def fork(self, name: str = MODEL_PARALLEL) -> Iterator[None]:
        """Use the state ``name`` inside the context and store its final value.

        Forks may be nested: an inner fork continues a state that an outer one uses, and vice versa, so that no number
        is drawn twice.
        """
        if name not in self.states_:
            known = ", ".join(self.states_) or "none; call model_parallel_cuda_manual_seed first"
            raise ConfigError(f"there is no generator state {name!r}; known: {known}")
        outside = _get_state()
        self._store_state_in_use()
        _set_state(self.states_[name])
        # The name and not the state is on the stack: an inner fork of the same name continues it.
        self.forks.append(name)
        try:
            yield
        finally:
            self.states_[self.forks.pop()] = _get_state()
            _set_state(self.states_.get(self.forks[-1], outside) if self.forks else outside)


_TRACKER: CudaRNGStatesTracker = cast(CudaRNGStatesTracker, Forwarding(RankLocal(CudaRNGStatesTracker)))


def get_cuda_rng_tracker(
    use_te_rng_tracker: bool = False, inference_rng_tracker: bool = False, use_cudagraphable_rng: bool = False
) -> CudaRNGStatesTracker:
    """The tracker of this rank; the arguments have no effect."""
    return _TRACKER


def initialize_rng_tracker(
    use_te_rng_tracker: bool = False,
    inference_rng_tracker: bool = False,
    use_cudagraphable_rng: bool = False,
    force_reset: bool = False,
) -> None:
    """Do nothing, because the tracker exists; with ``force_reset`` remove its states."""
    if force_reset:
        _TRACKER.reset()


def current_seed() -> int:
    """The seed of weights and dropout: the last one of ``model_parallel_cuda_manual_seed``, or 1234."""
    return _TRACKER.seed


def get_all_rng_states() -> dict[str, Tensor]:
    """The states of the tracker by name."""
    return _TRACKER.get_states()


def get_expert_parallel_rng_tracker_name() -> str:
    """The name of the state that differs between expert-parallel ranks."""
    return EXPERT_PARALLEL


def get_data_parallel_rng_tracker_name() -> str:
    """The name of the state that is equal on tensor-parallel ranks."""
    return DATA_PARALLEL


def model_parallel_cuda_manual_seed(
    seed: int,
    te_rng_tracker: bool = False,
    inference_rng_tracker: bool = False,
    use_cudagraphable_rng: bool = False,
    tp_rank: int | None = None,
    ep_rank: int | None = None,
    etp_rank: int | None = None,
    force_reset_rng: bool = False,
) -> None:
    """Seed torch with ``seed`` and add three states: equal on all TP ranks, different on each TP rank, and different on
    expert-parallel ranks.

    The seeds are Megatron Core's: ``seed``, ``seed + 2718 + tp_rank`` and ``seed + 1024 + 100 ep_rank + etp_rank``.
    Existing states are replaced.
    """
    indices = {"tp": tp_rank, "ep": ep_rank, "etp": etp_rank}
    tp, ep, etp = (current().index(axis) if index is None else index for axis, index in indices.items())
    _TRACKER.reset()
    _TRACKER.seed = seed
    torch.manual_seed(seed)
    _TRACKER.add(DATA_PARALLEL, seed)
    _TRACKER.add(MODEL_PARALLEL, seed + 2718 + tp)
    _TRACKER.add(EXPERT_PARALLEL, seed + 1024 + 100 * ep + etp)


def checkpoint(function: Callable[..., Any], distribute_saved_activations: bool, *args: Any) -> Any:
    """Call ``function(*args)`` with activation recomputation: backward computes it again (Chen et al. 2016).

    Both passes use the same states of torch's generators and of the tracker. ConfigError for
    ``distribute_saved_activations``; use sequence parallelism.
    """
    if distribute_saved_activations:
        raise ConfigError("distribute_saved_activations=True is not supported; use sequence_parallel")
    # torch's checkpoint preserves the generators of torch, and not the states that the tracker has stored.
    again = _same_states()
    passes = list[None]()

    def run(*inputs: Any) -> Any:
        # The first call is the forward itself; later ones recompute it.
        passes.append(None)
        if len(passes) == 1:
            return function(*inputs)
        with again():
            return function(*inputs)

    return torch.utils.checkpoint.checkpoint(run, *args, use_reentrant=False)


def _same_states() -> Callable[[], AbstractContextManager[None]]:
    """Return a context with the tracker's states and forks of now; it restores those that it found."""
    # A copy: the forward changes the states.
    before = _TRACKER.get_states()
    forks = list(_TRACKER.forks)

    @contextmanager
    def again() -> Iterator[None]:
        now = _TRACKER.get_states()
        forks_now = _TRACKER.forks
        _TRACKER.set_states(before)
        _TRACKER.forks = list(forks)
        try:
            yield
        finally:
            _TRACKER.forks = forks_now
            _TRACKER.set_states(now)

    return again


def same_random_numbers() -> Callable[[], AbstractContextManager[None]]:
    """Return a context in which torch's generators and the tracker repeat the numbers that follow this call.

    Outside it their states are as they were. Use it for recomputation.
    """
    states = _same_states()
    on_cpu = torch.get_rng_state()
    # Asking for the state of a GPU would initialize CUDA.
    gpus = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    on_gpu = [torch.cuda.get_rng_state(gpu) for gpu in gpus]

    @contextmanager
    def again() -> Iterator[None]:
        with torch.random.fork_rng(gpus), states():
            torch.set_rng_state(on_cpu)
            for gpu, state in zip(gpus, on_gpu, strict=True):
                torch.cuda.set_rng_state(state, gpu)
            yield

    return again
