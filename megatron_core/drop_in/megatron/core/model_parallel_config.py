"""The configuration of modules that are split over ranks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_core.errors import ConfigError
from megatron_core.ops import Backend


@dataclass
class ModelParallelConfig:
    """How a model is split, in which dtype it computes, and what a pipeline step calls.

    Parallel layers take it as their ``config``. The sizes are compared with the current layout when a model is built.
    """

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    sequence_parallel: bool = False
    context_parallel_size: int = 1
    hierarchical_context_parallel_sizes: Sequence[int] | None = None
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None
    perform_initialization: bool = True
    use_cpu_initialization: bool = False
    """Weights stay on the CPU; otherwise they are made on the current GPU, if there is one."""
    fp16: bool = False
    bf16: bool = False
    params_dtype: torch.dtype = torch.float32
    timers: Any = None
    """Kept for the caller."""
    finalize_model_grads_func: Callable[..., None] | None = None
    """Called with the model's chunks, and the sum of tokens or None, after the last backward of a step."""
    grad_scale_func: Callable[[torch.Tensor], torch.Tensor] | None = None
    """Scales the loss of each micro-batch."""
    no_sync_func: Any = None
    """Makes the context of backward passes that are not the last, or a list with one for each chunk."""
    grad_sync_func: Any = None
    """Kept for the caller; gradients are reduced as ``no_sync_func`` and the wrapper say."""
    param_sync_func: Any = None
    """Kept for the caller; the wrapper waits for parameters itself."""
    pipeline_dtype: torch.dtype | None = None
    """Of messages between stages; default that of the weights."""
    variable_seq_lengths: bool = False
    cross_entropy_loss_fusion: bool = False
    cross_entropy_fusion_impl: str = "native"
    cpu_offloading: bool = False
    cpu_offloading_num_layers: int = 0
    calculate_per_token_loss: bool = False
    tp_comm_overlap: bool = True
    """Reduce input gradients while weight gradients are computed."""
    kernel_backend: Backend = "auto"
    """As ``--kernel-backend``; no field of Megatron's."""

    def __post_init__(self) -> None:
        """Check what excludes what."""
        if self.sequence_parallel and self.tensor_model_parallel_size < 2:
            raise ConfigError(
                "sequence_parallel=True needs tensor_model_parallel_size above 1; switch it off, or raise that"
            )
        if self.expert_tensor_parallel_size is None:
            self.expert_tensor_parallel_size = self.tensor_model_parallel_size
        if self.pipeline_model_parallel_size > 1 and self.pipeline_dtype is None:
            raise ConfigError("pipeline_dtype=None: give the dtype of messages between stages, such as params_dtype")

    @property
    def fp8_precision(self) -> None:
        """None: parallel layers that are built from it multiply in the weights' dtype."""
        return None

    @property
    def device(self) -> torch.device:
        """Where weights are made."""
        if torch.cuda.is_available() and not self.use_cpu_initialization:
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")
