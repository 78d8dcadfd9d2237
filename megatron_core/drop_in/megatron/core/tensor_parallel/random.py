"""Named states of random generators, which a custom layer needs for dropout of activations that are split over the
tensor-parallel ranks; recomputation, also without keeping outputs. The engine's own dropout needs no generator.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import compress
from typing import Any, cast

import torch
import torch.utils.checkpoint
from torch import Tensor

from megatron_core.errors import ConfigError
from megatron_core.parallel.current import current
from megatron_core.parallel.rank_local import Forwarding, RankLocal
from megatron_core.tensor_parallel.dropout import KeyedDropout as KeyedDropout

HAVE_TE = False
"""Whether Transformer Engine's generator states are used."""
MODEL_PARALLEL = "model-parallel-rng"
DATA_PARALLEL = "data-parallel-rng"
EXPERT_PARALLEL = "expert-parallel-rng"
DEFAULT_SEED = 1234


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
        _RUNNING.append(None)
        try:
            with again() if len(passes) > 1 else nullcontext():
                return function(*inputs)
        finally:
            _RUNNING.pop()

    return torch.utils.checkpoint.checkpoint(run, *args, use_reentrant=False)


_RUNNING = list[None]()
"""An entry for each function that ``checkpoint`` is calling."""


def is_checkpointing() -> bool:
    """Whether a function of ``checkpoint`` is running; layers that the engine recomputes are not counted."""
    return bool(_RUNNING)


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


def convert_cuda_rng_state(
    state: torch.Tensor | torch.Generator, to_graphable: bool = False
) -> torch.Tensor | torch.Generator:
    """Return a generator's state as a tensor, or with ``to_graphable`` as a generator, which CUDA graphs can register.

    Errors: ConfigError (a ValueError) for other types.
    """
    if not isinstance(state, torch.Tensor | torch.Generator):
        raise ConfigError(f"Invalid state type: {type(state)}; give a tensor or a torch.Generator")
    if isinstance(state, torch.Tensor) is not to_graphable:
        return state
    if isinstance(state, torch.Generator):
        return state.get_state()
    generator = torch.Generator("cuda" if torch.cuda.is_available() else "cpu")
    generator.set_state(state)
    return generator


class CheckpointWithoutOutput:
    """Recompute a function in backward, and free its outputs in forward.

    ``checkpoint`` recomputes the activations inside a function, but later operations save its outputs. Here the memory
    of the outputs is freed after those operations, and filled again when the gradient of a later tensor is computed::

        discarded = CheckpointWithoutOutput()
        hidden = discarded.checkpoint(torch.nn.functional.gelu, x)
        out = linear(hidden)
        discarded.discard_output_and_register_recompute(out)

    Outputs must be saved as they are, or as views, by the operations after them. An object serves one call.
    Outputs that share the memory of an argument, such as views of it, are kept.
    ``fp8`` has no effect, because FP8 needs no context here. Source: Megatron Core's class of this name.
    """

    def __init__(self, fp8: Any = False) -> None:
        self.fp8 = fp8
        self._outputs: tuple[Tensor, ...] = ()
        self._freed: list[bool] = []
        self._call: Any = None

    def checkpoint(self, run_function: Callable[..., Any], *args: Any) -> Any:
        """Return ``run_function(*args)``, a tensor or a tuple of tensors; its activations are not kept."""
        result = _Discarded.apply(self, run_function, *args)
        # Freeing an output that is a view of an argument would free the argument.
        inputs = {_address(argument) for argument in args if isinstance(argument, Tensor)}
        self._outputs = (result,) if isinstance(result, Tensor) else tuple(result)
        self._freed = [_address(output) not in inputs for output in self._outputs]
        return result

    def discard_output_and_register_recompute(self, hook_tensor: Tensor) -> None:
        """Free the outputs; the gradient of ``hook_tensor`` restores them, which must precede their use in backward.

        Nothing is freed if ``hook_tensor`` needs no gradient, because nothing would restore the outputs.
        Errors: ConfigError if ``checkpoint`` was not called.
        """
        if not self._outputs:
            raise ConfigError("discard_output_and_register_recompute needs outputs; call checkpoint first")
        if hook_tensor.requires_grad and any(self._freed):
            sizes = [output.untyped_storage().nbytes() for output in self._outputs]
            for output in compress(self._outputs, self._freed):
                # The storage and not the tensor: operations after this one have saved other tensor objects with the
                # same storage.
                output.untyped_storage().resize_(0)
            hook_tensor.register_hook(lambda _: self._restore(sizes))

    def _restore(self, sizes: Sequence[int]) -> None:
        """Compute the outputs again, into their memory; tensors that autograd saved do not count this as a change."""
        call = self._call
        outputs = self._outputs
        # A second backward through the graph that was kept.
        if call is None:
            return
        self._call = None
        self._outputs = ()
        for output, size, computed in compress(zip(outputs, sizes, _call_again(call), strict=True), self._freed):
            storage = output.untyped_storage()
            storage.resize_(size)
            # Written through another tensor, so that the version counter of the saved ones does not change.
            memory = torch.empty(0, dtype=output.dtype, device=output.device)
            memory.set_(storage, output.storage_offset(), output.size(), output.stride())
            memory.copy_(computed.detach())


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class _Discarded(torch.autograd.Function):
    """Call a function without its graph; backward uses the graph of the call that restored the outputs."""

    @staticmethod
    def forward(ctx: Any, owner: CheckpointWithoutOutput, function: Callable[..., Any], *args: Any) -> Any:
        """Call the function and describe how to call it again."""
        ctx.function = function
        ctx.random_numbers = same_random_numbers()
        ctx.others = [None if isinstance(argument, Tensor) else argument for argument in args]
        ctx.places = [index for index, argument in enumerate(args) if isinstance(argument, Tensor)]
        ctx.save_for_backward(*(args[index] for index in ctx.places))
        owner._call = ctx
        return function(*args)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        """Return the gradients of the arguments, and add those of parameters that the function reads."""
        results = ctx.results if hasattr(ctx, "results") else _call_again(ctx)  # the latter if nothing was discarded
        # Outputs without a gradient, such as indices, are not part of the graph.
        pairs = [(out, grad) for out, grad in zip(results, gradients, strict=True) if out.requires_grad]
        torch.autograd.backward([out for out, _ in pairs], [grad for _, grad in pairs])
        input_gradients = tuple(tensor.grad if isinstance(tensor, Tensor) else None for tensor in ctx.inputs)
        del ctx.inputs, ctx.results
        return None, None, *input_gradients


def _call_again(ctx: Any) -> tuple[Tensor, ...]:
    """Call the function of a ``_Discarded`` again with its graph, inputs and random numbers."""
    ctx.inputs = list(ctx.others)
    for index, saved in zip(ctx.places, ctx.saved_tensors, strict=True):
        ctx.inputs[index] = saved.detach().requires_grad_(saved.requires_grad)
    with torch.enable_grad(), ctx.random_numbers():
        result = ctx.function(*ctx.inputs)
    ctx.results = (result,) if isinstance(result, Tensor) else tuple(result)
    return ctx.results
