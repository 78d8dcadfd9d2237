"""The kernel that computes attention on a GPU, and the memory of attention dropout there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron_core.config import RunConfig
from megatron_core.config.attention import attention_of

WITHOUT_PLANS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Kernels of torch other than cuDNN's, which makes a plan for each new shape."""


def kernels_for(query: Tensor) -> AbstractContextManager[object]:
    """Exclude cuDNN for a single query on a GPU: in generation the keys get longer with every token."""
    if not query.is_cuda or query.shape[2] > 1 or torch.compiler.is_compiling():
        return nullcontext()
    exclusion: AbstractContextManager[object] = sdpa_kernel(WITHOUT_PLANS)
    return exclusion


def chosen_kernel(config: RunConfig, device: torch.device) -> str | None:
    """Name of torch's kernel for the causal attention of training, such as ``flash attention``; None on a CPU."""
    model, parallel = config.model, config.parallel
    if device.type != "cuda" or model.attention_backend == "unfused":
        return None
    tp = parallel.tensor_model_parallel_size
    kind = attention_of(model)
    dtype = getattr(torch, config.training.compute_dtype)
    # Values are padded to the channels of keys (``fused_attention``).
    shape = config.data.seq_length, kind.query_head_size
    query = torch.empty(1, max(model.num_attention_heads // tp, 1), *shape, dtype=dtype, device=device)
    key = torch.empty(1, kind.key_value_heads(tp), *shape, dtype=dtype, device=device)
    choice = torch._fused_sdp_choice(query, key, key, None, 0.0, True, enable_gqa=query.shape[1] != key.shape[1])
    return SDPBackend(choice).name.lower().replace("_", " ").removesuffix(" attention") + " attention"


def dropout_notes(config: RunConfig, device: torch.device) -> Iterator[str]:
    """The cost of attention dropout on a GPU: its mask depends on positions, so that no flash kernel computes it."""
    model, parallel = config.model, config.parallel
    trains = not config.training.skip_train
    if device.type != "cuda" or model.attention_dropout == 0.0 or model.attention_backend == "unfused" or not trains:
        return
    parts = parallel.tensor_model_parallel_size * parallel.context_parallel_size
    dtype = getattr(torch, config.training.compute_dtype)
    weights = config.training.micro_batch_size * model.num_attention_heads * config.data.seq_length**2 // 2 // parts
    yield (
        f"attention_dropout={model.attention_dropout} computes attention without flash kernels, and keeps its weights "
        f"for backward: {weights * dtype.itemsize / 2**30:.2g} GiB for each copy, layer and micro-batch; "
        "--attention-dropout 0 keeps none"
    )
