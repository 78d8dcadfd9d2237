"""Attention of single queries to keys and values in blocks, for generation; a native kernel on CPUs."""

import math

from torch import Tensor

from megatron_core.ops import native
from megatron_core.ops.backend import Backend


def has_native_paged_attention(query: Tensor, backend: Backend) -> bool:
    """Whether ``native_paged_attention`` exists for the device and dtype of ``query``, and ``backend`` permits it."""
    if backend == "reference" or not query.is_cpu:
        return False
    return native.unavailable_reason("paged_attention", "cpu", query.dtype) is None


def native_paged_attention(
    query: Tensor, keys: Tensor, values: Tensor, tables: Tensor, lengths: Tensor, *, window: int | None = None
) -> Tensor:
    """softmax(q K^T / sqrt(d)) V of ``query`` ``[n, heads, d]``, each row over the positions of its own text.

    ``keys`` ``[blocks, positions of a block, groups, d]`` and ``values`` ``[..., e]``; row i of ``tables`` ``[n, m]``
    has the blocks of text i, of which the first ``lengths[i]`` positions are read, or the last ``window`` of these.
    Memory is read once for adjacent rows with the same blocks. Returns ``[n, heads, e]``. Only for inference.
    Source: Kwon et al. 2023, section 4.3.
    """
    query = query.contiguous()
    rows, heads, channels = query.shape
    # Only the query is made contiguous: it is one token of each text; keys and values are read where the cache has
    # them.
    out = query.new_empty(rows, heads, values.shape[-1])
    native.call(
        "paged_attention",
        query,
        *(rows, heads, keys.shape[2], channels, values.shape[-1], keys.shape[1], query),
        *(keys, keys.stride(1), keys.stride(2), values, values.stride(1), values.stride(2)),
        *(tables, tables.shape[1], lengths, window or 0, 1.0 / math.sqrt(channels), out),
    )
    return out
