"""``megatron_core.tensor_parallel.random`` and ``discarded_outputs`` at Megatron's path."""

from typing import Any

import torch

from megatron_core.errors import ConfigError
from megatron_core.tensor_parallel.discarded_outputs import CheckpointWithoutOutput
from megatron_core.tensor_parallel.random import *  # noqa: F403

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
