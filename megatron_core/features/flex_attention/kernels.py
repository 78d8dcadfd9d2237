"""Torch's kernels on GPUs for windows, bounded scores and packed documents: FlexAttention, variable-length attention.

FlexAttention does not store scores. ``torch.compile`` generates the kernel for the functions of a call: ``score_mod``
bounds a score, and ``mask_mod`` is true if a query attends to a key. Both are also the definition: evaluated for all
queries and keys they give the reference. Blocks without a visible key are skipped, and ``mask_mod`` is not called for
blocks without a hidden key.
Source: Dong et al. 2024, FlexAttention. On a CPU, where torch has neither, one call per document is the fastest.
"""

import inspect
from collections.abc import Callable
from functools import cache, lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from megatron_core.config import RunConfig
from megatron_core.errors import ConfigError
from megatron_core.parallel.compiled import GRAPHS
from megatron_core.parallel.micro_batch import to_device
from megatron_core.transformer.context import PackedDocuments
from megatron_core.transformer.core_attention import CoreAttention

BLOCK = 128
"""Queries and keys of a block; the kernel's own default."""
SMALLEST = 16
"""Smallest number of channels of a head that Triton's products take."""


def flex_obstacle(device: torch.device) -> str | None:
    """Why FlexAttention cannot train on a device; None if it can."""
    if device.type != "cuda":
        return "torch has its backward only for GPUs"
    if find_spec("triton") is None:
        return "torch compiles it with Triton, which is not installed"
    return None


def check_flex(config: RunConfig, device: torch.device) -> None:
    """ConfigError if FlexAttention is requested and unavailable on the device."""
    if (reason := flex_obstacle(device)) is not None:
        raise ConfigError(f"attention_backend=flex is not available: {reason}; use attention_backend=auto")


def attend_on_gpu(
    core: CoreAttention, query: Tensor, key: Tensor, value: Tensor, documents: PackedDocuments | None
) -> Tensor | None:
    """Compute the call ``[b, heads, s, d]`` of a core attention; None if neither kernel supports it or speeds it up.

    ConfigError if FlexAttention is requested and does not support it.
    """
    has_window = core.window is not None and core.window < query.shape[2]
    is_varlen = documents is not None and core.softcap is None and takes_variable_lengths(query, key, value)
    # Plain causal attention is faster in torch's flash kernel.
    serves = core.softcap is not None or has_window or documents is not None
    if core.flex == "always" or (core.flex == "auto" and serves and not is_varlen):
        reason = None if torch.compiler.is_compiling() else unsupported_reason(query, key, value)
        if core.flex == "always" and reason is not None:
            raise ConfigError(f"attention_backend=flex: {reason}; use attention_backend=auto")
        if reason is None and not torch.compiler.is_compiling():
            return flex_attention(query, key, value, window=core.window, softcap=core.softcap, documents=documents)
    return variable_length_attention(query, key, value, documents, core.window) if documents and is_varlen else None


def unsupported_reason(query: Tensor, key: Tensor, value: Tensor) -> str | None:
    """Why ``flex_attention`` does not support these tensors ``[b, heads, s, d]``; None if it does."""
    if (reason := flex_obstacle(query.device)) is not None:
        return reason
    if query.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"it does not support {query.dtype}"
    if min(query.shape[-1], value.shape[-1]) < SMALLEST:
        return f"heads have {min(query.shape[-1], value.shape[-1])} channels, and it needs {SMALLEST}"
    if query.shape[2] != key.shape[2]:
        return f"there are {query.shape[2]} queries and {key.shape[2]} keys"
    return None


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    window: int | None = None,
    softcap: float | None = None,
    documents: PackedDocuments | None = None,
) -> Tensor:
    """Causal attention within each document, over at most the last ``window`` keys, with scores c tanh(score / c).

    ``query`` ``[b, heads, s, d]``, ``key`` ``[b, groups, s, d]``, ``value`` ``[b, groups, s, e]`` -> ``[b, heads, s,
    e]``. Requires that ``unsupported_reason`` is None.
    """
    length = query.shape[2]
    device = query.device
    if documents is None:
        # Cached by length: windows of a model have few lengths, and a mask takes a few kernels to build.
        mask = _mask_of_length(length, window, device)
    # Kept with the documents, for all layers of the micro-batch.
    elif (mask := documents.masks.get(window)) is None:
        mask = documents.masks[window] = block_mask(first_keys(documents.lengths, window), device)
    bounded = None if softcap is None else _bounded(softcap)
    grouped = query.shape[1] != key.shape[1]
    return _compiled()(query, key, value, score_mod=bounded, block_mask=mask, enable_gqa=grouped)


@cache
def _compiled() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention as function

    # Beyond torch's limit of 8 it would run without a kernel, and store all scores.
    config: Any = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, GRAPHS)
    return torch.compile(function)


def _bounded(softcap: float) -> Callable[..., Tensor]:
    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return score_mod


def first_keys(lengths: tuple[tuple[int, ...], ...], window: int | None) -> Tensor:
    """The first key that each query sees, int32 ``[b, s]``: in its document, and in its window."""
    rows = []
    for document_lengths in lengths:
        size = torch.tensor(document_lengths)
        start = (size.cumsum(0) - size).repeat_interleave(size)
        rows.append(start if window is None else torch.maximum(start, torch.arange(len(start)) + 1 - window))
    return torch.stack(rows).int()


@lru_cache(maxsize=16)
def _mask_of_length(length: int, window: int | None, device: torch.device) -> Any:
    return block_mask(first_keys(((length,),), window), device)


def block_mask(first: Tensor, device: torch.device) -> Any:
    """torch's ``BlockMask`` in which query q of sequence b sees the keys from ``first[b, q]`` to q.

    ``first`` ``[b or 1, s]``, on the host, does not decrease along a sequence. The visible blocks of a block of queries
    are therefore a range, and so are those without a hidden key: memory is O(b (s / 128)^2) integers instead of O(b
    s^2).
    """
    from torch.nn.attention.flex_attention import BlockMask

    first = to_device(first, device)
    batch, length = first.shape
    query_block = torch.arange(-(-length // BLOCK), device=device, dtype=torch.int32)
    last_query = (BLOCK * (query_block + 1)).clamp_max(length) - 1
    low = first[:, ::BLOCK] // BLOCK
    # Blocks from ``whole`` up to the one before the own block have no hidden key; the others have some.
    first_full = torch.minimum((first[:, last_query.long()] + BLOCK - 1) // BLOCK, query_block)
    count = first_full - low
    column = query_block[None, None, :]
    partial = torch.where(column < count[..., None], low[..., None] + column, query_block[None, :, None])
    partial = torch.where(column <= count[..., None], partial, 0)
    full = torch.where(column < (query_block - first_full)[..., None], first_full[..., None] + column, 0)

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (k >= first[b if batch > 1 else 0, q])

    return BlockMask.from_kv_blocks(
        (count + 1).int()[:, None].contiguous(),
        partial.int()[:, None].contiguous(),
        (query_block - first_full).int()[:, None].contiguous(),
        full.int()[:, None].contiguous(),
        BLOCK_SIZE=BLOCK,
        mask_mod=visible,
        seq_lengths=(length, length),
    )


WIDEST = 256
"""Largest head size of torch's flash attention; sizes must be multiples of 8."""


@cache
def varlen_operator() -> Any:
    """torch's ``varlen_attn``, or None before the release with windows and grouped queries (2.11)."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn if {"window_size", "enable_gqa"} <= set(inspect.signature(varlen_attn).parameters) else None


def takes_variable_lengths(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether ``variable_length_attention`` supports these tensors: on a GPU, in 16 bits, heads of one legal size."""
    size = query.shape[-1]
    legal = size % 8 == 0 and size <= WIDEST and key.shape[-1] == size == value.shape[-1]
    narrow = query.dtype in (torch.bfloat16, torch.float16)
    return query.is_cuda and narrow and legal and varlen_operator() is not None


def variable_length_attention(
    query: Tensor, key: Tensor, value: Tensor, documents: PackedDocuments, window: int | None
) -> Tensor:
    """Causal attention within each document, over at most the last ``window`` keys; memory is O(tokens).

    ``query`` ``[b, heads, s, d]``, ``key`` and ``value`` ``[b, groups, s, d]`` -> ``[b, heads, s, d]``.
    Source: Dao 2023, FlashAttention-2, with sequences of different lengths.
    """
    batch, heads, _, _ = query.shape
    tokens = [x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)]  # [b * s, heads, d]
    # The same starts for queries and keys, whose documents are equal in training.
    starts = documents.starts
    longest = documents.longest
    out: Tensor = varlen_operator()(
        *tokens,
        starts,
        starts,
        longest,
        longest,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=key.shape[1] != heads,
    )
    return out.unflatten(0, (batch, -1)).transpose(1, 2)
