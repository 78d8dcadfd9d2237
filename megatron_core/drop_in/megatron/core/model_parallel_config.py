"""The configuration of modules that are split over ranks."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from megatron.core.mirror import mirror
from megatron_core.errors import ConfigError
from megatron_core.tensor_parallel.arithmetic import PLAIN, LayerArithmetic


@dataclass
class ModelParallelConfig(mirror("ModelParallelConfig")):  # type: ignore[misc]
    """Layout and dtypes of a model, and the functions that a pipeline step calls.

    Parallel layers take it as their ``config``. The sizes are compared with the current layout when a model is built.
    Weights are allocated on the current GPU if there is one, and on the CPU with ``use_cpu_initialization``.
    ``kernel_backend`` is --kernel-backend and not a field of Megatron's.
    """

    arithmetic: ClassVar[LayerArithmetic] = PLAIN  # --layout-invariant is not a setting of Megatron's
    tp_comm_overlap_chunks: ClassVar[int] = 1  # nor is --tp-comm-overlap-chunks
    params_dtype: torch.dtype = torch.float32
    finalize_model_grads_func: Callable[..., None] | None = None
    """Called after the last backward of a step with the model's chunks and the sum of tokens or None."""
    grad_scale_func: Callable[[torch.Tensor], torch.Tensor] | None = None
    """Scales the loss of each micro-batch."""
    no_sync_func: Any = None
    """Returns the context of all backward passes but the last; or a list with a function for each chunk."""
    grad_sync_func: Any = None
    """Not called: ``no_sync_func`` and the wrapper decide when gradients are reduced."""
    param_sync_func: Any = None
    """Not called: the wrapper waits for parameters."""
    pipeline_dtype: torch.dtype | None = None
    """Dtype of the messages between stages; default: the dtype of the weights."""

    def __post_init__(self) -> None:
        """Check conflicting settings."""
        if self.sequence_parallel and self.tensor_model_parallel_size < 2:
            raise ConfigError(
                "sequence_parallel=True needs tensor_model_parallel_size > 1; disable it or raise the size"
            )
        if self.cross_entropy_loss_fusion and self.cross_entropy_fusion_impl == "te":
            warnings.warn(
                "cross_entropy_fusion_impl='te' has known stability issues in Transformer Engine; use native",
                stacklevel=3,
            )
        own: Any = self  # a type checker takes an assignment to ``self`` for the declaration of a field
        if own.expert_tensor_parallel_size is None:
            own.expert_tensor_parallel_size = own.tensor_model_parallel_size
        if self.pipeline_model_parallel_size > 1 and self.pipeline_dtype is None:
            raise ConfigError("pipeline_dtype=None: give the dtype of messages between stages, such as params_dtype")

    @property
    def device(self) -> torch.device:
        """The device on which weights are allocated."""
        if torch.cuda.is_available() and not self.use_cpu_initialization:
            return torch.device(torch.cuda.current_device())
        return torch.device("cpu")
