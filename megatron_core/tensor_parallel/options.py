"""What all parallel layers of a model have in common."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_core.ops import Backend


@dataclass(frozen=True, kw_only=True)
class ModelParallelConfig:
    """How parallel layers are built and how they communicate; any object with these attributes will do."""

    sequence_parallel: bool = False
    """Activations outside the matrix products are split along the sequence."""
    params_dtype: torch.dtype = torch.float32
    """Dtype of weights and activations."""
    tp_comm_overlap: bool = True
    """Reduce input gradients while weight gradients are computed."""
    perform_initialization: bool = True
    """Draw the weights when a layer is made; False leaves them to the caller."""
    variable_seq_lengths: bool = False
    """Micro-batches have sequences of different lengths, which only their messages tell the next pipeline stage."""
    kernel_backend: Backend = "auto"
    """Body of the operation that adds a weight gradient to a main gradient, as the flag of this name."""
    device: torch.device | str = "cpu"
    """Where the weights lie."""
