"""``megatron_core.tensor_parallel.random`` and ``discarded_outputs`` at Megatron's path."""

from typing import Any

import torch

from megatron_core.errors import ConfigError
from megatron_core.tensor_parallel import discarded_outputs
from megatron_core.tensor_parallel.random import *  # noqa: F403

HAVE_TE = False
"""Whether Transformer Engine's generator states are used."""


class CheckpointWithoutOutput(discarded_outputs.CheckpointWithoutOutput):
    """The engine's class with Megatron's argument ``fp8``, which has no effect: FP8 needs no context here."""

    def __init__(self, fp8: Any = False) -> None:
        super().__init__()
        self.fp8 = fp8


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
