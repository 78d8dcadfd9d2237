"""``megatron_core.tensor_parallel.random`` at Megatron's path, and recomputation that frees outputs."""

from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from megatron_core.errors import ConfigError
from megatron_core.tensor_parallel.random import *  # noqa: F403
from megatron_core.tensor_parallel.random import same_random_numbers

HAVE_TE = False
"""Whether Transformer Engine's generator states are used."""


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
