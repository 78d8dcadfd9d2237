"""Attention of packed documents on a GPU: one call of torch's variable-length flash attention for all documents.

torch has no CPU kernel for it; on a CPU one call per document is the fastest (``core_attention``).
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import torch
from torch import Tensor

from megatron_core.transformer.context import PackedDocuments

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
