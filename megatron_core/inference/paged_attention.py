"""Attention of a generation step to keys and values in blocks (Kwon et al. 2023, PagedAttention).

A core attention of a feature may have methods with the same names instead of ``attend_cached`` and ``attend_fresh``.
"""

import math
from functools import partial

import torch
from torch import Tensor

from megatron_core.inference.paged_step import PagedStep
from megatron_core.ops import native
from megatron_core.ops.backend import Backend
from megatron_core.transformer.context import SequenceContext, chunk_lengths
from megatron_core.transformer.core_attention import (
    CoreAttention,
    TokenSpan,
    attention_by_documents,
    causal_products,
    fused_attention,
)


def attend_cached(
    core: CoreAttention, query: Tensor, keys: Tensor, values: Tensor, step: PagedStep, sinks: Tensor | None = None
) -> Tensor:
    """Compute attention of the ``step.cached`` first tokens of a step, ``[tokens, heads, d]``.

    ``keys`` and ``values`` are the memory of the layer. Returns ``[tokens, heads * e]``.
    """
    singles = len(step.lengths)
    by_formula = core.by_formula or sinks is not None
    in_chunks = core.chunk is not None and step.longest > core.chunk
    outputs = []
    if singles and not (by_formula or in_chunks) and has_native_paged_attention(query, core.backend):
        out = native_paged_attention(query[:singles], keys, values, step.tables, step.lengths, window=core.window)
        outputs.append(out.flatten(1))
    elif singles:
        key, value = (step.gathered(memory, step.tables, step.longest).transpose(1, 2) for memory in (keys, values))
        alone = query[:singles, :, None]
        if by_formula:
            hidden = step.masked(core.window, core.chunk)
            out = core.by_reference(alone, key, value, SequenceContext(), hidden, sinks)
        else:
            out = fused_attention(alone, key, value, step.bias(core.window, query.dtype, core.chunk))
        outputs.append(out.flatten(1))
    for chunk in step.chunks:
        queries = query[chunk.row : chunk.row + chunk.count].transpose(0, 1)[None]
        of_text = (step.gathered(memory, chunk.table, chunk.length) for memory in (keys, values))
        key, value = (tensor.transpose(0, 1)[None] for tensor in of_text)
        out = _in_chunks(core, queries, key, value, sinks)
        outputs.append(out[0].transpose(0, 1).flatten(1))
    return torch.cat(outputs)


def attend_fresh(
    core: CoreAttention, query: Tensor, key: Tensor, value: Tensor, step: PagedStep, sinks: Tensor | None = None
) -> Tensor:
    """Compute attention of the last tokens of a step, in chunks from position 0 on, ``[tokens, heads, d]``.

    Returns ``[tokens, heads * e]``.
    """
    query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
    lengths = step.fresh if core.chunk is None else chunk_lengths(step.fresh, core.chunk)
    causal = partial(_causal, core, sinks=sinks)
    return attention_by_documents(query, key, value, [lengths], causal)[0].transpose(0, 1).flatten(1)


def _in_chunks(core: CoreAttention, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
    """``_causal`` of the last tokens of a document for each chunk of ``attention_chunk_size`` tokens."""
    if core.chunk is None:
        return _causal(core, query, key, value, TokenSpan(), sinks)
    length = key.shape[2]
    first = length - query.shape[2]
    position = first
    outputs = []
    while position < length:
        start = position // core.chunk * core.chunk
        stop = min(start + core.chunk, length)
        keys = slice(start, stop)
        queries = query[:, :, position - first : stop - first]
        outputs.append(_causal(core, queries, key[:, :, keys], value[:, :, keys], TokenSpan(), sinks))
        position = stop
    return torch.cat(outputs, dim=2)


def _causal(
    core: CoreAttention, query: Tensor, key: Tensor, value: Tensor, span: TokenSpan, sinks: Tensor | None = None
) -> Tensor:
    """Compute causal attention of one document without dropout; the last query attends to the last key."""
    if core.by_formula or sinks is not None:
        return core.by_reference(query, key, value, SequenceContext(), sinks=sinks)
    return causal_products(query, key, value, span, window=core.window)


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
