"""The settings that all parallel layers of a model share."""

from dataclasses import dataclass

import torch

from megatron_core.ops import Backend
from megatron_core.tensor_parallel.fp8 import FP8Precision


@dataclass(frozen=True, kw_only=True)
class ModelParallelConfig:
    """How parallel layers are built and how they communicate; any object with these attributes is accepted."""

    sequence_parallel: bool = False
    """Activations outside the matrix products are split along the sequence."""
    params_dtype: torch.dtype = torch.float32
    """Dtype of weights and activations."""
    tp_comm_overlap: bool = True
    """Reduce input gradients while weight gradients are computed."""
    cp_comm_type: tuple[str, ...] = ("p2p",)
    """How attention communicates over context-parallel ranks, one for all layers or one for each; see
    --cp-comm-type."""
    perform_initialization: bool = True
    """Initialise the weights in the constructor of a layer; False: the caller does it."""
    kernel_backend: Backend = "auto"
    """Backend of the operation that adds a weight gradient to a main gradient; see --kernel-backend."""
    fp8_precision: FP8Precision | None = None
    """What makes linear layers multiply in FP8."""
    device: torch.device | str = "cpu"
    """Device of the weights."""
