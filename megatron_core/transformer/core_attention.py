"""softmax(Q K^T / sqrt(d)) V for the heads of this rank."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from megatron_core.config import ModelConfig
from megatron_core.ops import attention_softmax
from megatron_core.tensor_parallel import KeyedDropout
from megatron_core.transformer.context import PackedDocuments, SequenceContext


class CoreAttention(nn.Module):
    """Attention of query heads ``[s, b, heads, d]`` over key and value heads ``[t, b, groups, d]``.

    Returns ``[s, b, heads * d]``. The fused path is torch's ``scaled_dot_product_attention``, called for each document
    where the context has several. The unfused path spells the formula out; it serves ``attention_backend='unfused'``
    and attention dropout, whose mask has to depend on the global head and not on a generator; the configuration's
    ``kernel_backend`` says which body of the softmax computes it. ``first_head`` is the global number of this rank's
    first query head.
    Source: Vaswani et al. 2017, section 3.2.1; Ainslie et al. 2023 for groups.
    """

    def __init__(self, config: ModelConfig, dropout: KeyedDropout, first_head: int) -> None:
        super().__init__()
        self.unfused = config.attention_backend == "unfused"
        self.backend = config.kernel_backend
        self.dropout = dropout
        self.first_head = first_head

    def forward(self, query: Tensor, key: Tensor, value: Tensor, context: SequenceContext) -> Tensor:
        """Attend; causal unless ``context`` has a mask, and inside of each document where it has documents."""
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        if self.unfused or self.dropout.active:
            out = self._unfused(query, key, value, context)
        elif context.documents is not None and context.attention_mask is None:
            out = _by_documents(query, key, value, context.documents)
        else:
            out = _fused(query, key, value, _visible(query, key, context))
        return out.permute(2, 0, 1, 3).flatten(2)

    def _unfused(self, query: Tensor, key: Tensor, value: Tensor, context: SequenceContext) -> Tensor:
        sharers = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(sharers, dim=1) for x in (key, value))
        weights = attention_softmax(
            query.matmul(key.transpose(-1, -2)),
            _masked(context),
            scale=1 / math.sqrt(query.shape[-1]),
            causal=context.attention_mask is None or context.documents is not None,
            backend=self.backend,
        )
        return self.dropout(weights, context.sample_index, first_head=self.first_head).matmul(value)


def _fused(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    """torch's attention; without a mask causal, unless there is one query, which sees all keys."""
    causal = mask is None and query.shape[2] > 1
    grouped = query.shape[1] != key.shape[1]
    return nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal, enable_gqa=grouped
    )


def _by_documents(query: Tensor, key: Tensor, value: Tensor, documents: PackedDocuments) -> Tensor:
    """Attention inside of each document: memory grows with s, work with the sum of the squared lengths.

    No mask for short documents: one core, s = 2048, 8 heads of 64, forward and backward take 347 to 357 ms with a
    mask, whatever it is; by documents 215 ms for one, 47 for 8, 18 for 32, 24 for 512, and 57 for 2048 of one token.
    """
    outputs = []
    # split, not slices: its backward puts all gradients together at once, where each slice would fill a whole tensor.
    for *sequence, lengths in zip(query.split(1), key.split(1), value.split(1), documents.lengths, strict=True):
        parts = zip(*(x.split(lengths, dim=2) for x in sequence), strict=True)
        outputs.append(torch.cat([_fused(*part) for part in parts], dim=2))
    return torch.cat(outputs)


def _masked(context: SequenceContext) -> Tensor | None:
    """True where a query must not see a key; None where the triangle alone says it."""
    documents = None if context.documents is None else context.documents.masked
    if context.attention_mask is None:
        return documents
    return context.attention_mask if documents is None else context.attention_mask | documents


def _visible(query: Tensor, key: Tensor, context: SequenceContext) -> Tensor | None:
    """True where a query sees a key, or None where torch's own causal flag says the same.

    Without a mask that is the lower right triangle: the last query sees all keys.
    """
    masked = _masked(context)
    if masked is not None:
        return ~masked
    queries, keys = query.shape[2], key.shape[2]
    if queries in (1, keys):
        return None
    return torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)
