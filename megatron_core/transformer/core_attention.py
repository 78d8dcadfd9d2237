"""softmax(Q K^T / sqrt(d)) V for the heads of this rank."""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron_core.config.attention import QUERY_BLOCK
from megatron_core.errors import ConfigError
from megatron_core.feature import layer_hooks, load_hook
from megatron_core.ops import attention_softmax
from megatron_core.ops.attention import causal_attention, has_native_attention
from megatron_core.parallel.groups import ALONE, Group
from megatron_core.transformer.context import LayerContext, SequenceContext


@dataclass(frozen=True)
class TokenSpan:
    """Tokens of the batch from ``start`` on, of one ``sample`` or (None) of all samples."""

    sample: int | None = None
    start: int = 0


Attend = Callable[[Tensor, Tensor, Tensor, TokenSpan], Tensor]
"""Function of queries, keys and values at a ``TokenSpan`` that returns the attention output ``[b, heads, s, d]``."""


FUSED = "fused_attention"
"""Name in ``Feature.layers`` of a function of a ``CoreAttention``, queries, keys, values and documents on a GPU that
returns their attention, or None for calls that its kernels do not compute or slow down."""


class CoreAttention(nn.Module):
    """Attention of queries ``[s, b, heads, d]`` over keys ``[t, b, groups, d]`` and values ``[t, b, groups, e]``.

    Returns ``[s, b, heads * e]``. Attention is causal: the last query and the last key have the same position.
    ``window_size`` is Megatron's (left, right): a query attends to its own key and at most ``left`` keys before it (-1:
    all). ``heads_over``: ranks that split the heads of this rank further. ``sinks`` ``[heads]`` are scores of one more
    key, whose value is 0 (gpt-oss).
    Source: Vaswani et al. 2017; Ainslie et al. 2023; Beltagy et al. 2020 for the window.
    """

    # The fused path is torch's ``scaled_dot_product_attention``; in float32 on a CPU ``ops.causal_attention``, which
    # takes half of its time; on a GPU a feature's kernels for windows, bounded scores (``attn_logit_softcapping``) and
    # packed documents. Elsewhere, for bounded scores and for attention dropout, whose mask must depend on the global
    # head index and not on a generator, the formula is evaluated for blocks of queries over the keys that they can see.
    # The reference, ``attention_backend='unfused'``, evaluates it for all queries and keys.

    def __init__(
        self,
        context: LayerContext,
        layer_number: int,
        *,
        window_size: tuple[int, int] | None = None,
        heads_over: Group = ALONE,
    ) -> None:
        super().__init__()
        config = context.config
        self.softcap = config.attn_logit_softcapping
        self.unfused = config.attention_backend == "unfused"
        self.by_formula = self.unfused or self.softcap is not None
        self.flex: Literal["auto", "always", "never"] = "always" if config.attention_backend == "flex" else "auto"
        """When FlexAttention is used: for the calls that it speeds up, for all, or never (in graphs)."""
        hook = layer_hooks().get(FUSED) if torch.cuda.is_available() or self.flex == "always" else None
        self.kernel: Callable[..., Tensor | None] | None = None if hook is None else load_hook(hook)
        if self.flex == "always" and self.kernel is None:
            raise ConfigError("attention_backend=flex: this package lacks the feature; use attention_backend=auto")
        self.backend = config.kernel_backend
        self.dropout = context.dropout(config.attention_dropout, f"layers.{layer_number}.attention_weights")
        divisions = context.tp_group.size() * heads_over.size()
        # Dropout of attention weights is keyed by the global head, so that each split of the heads drops the same
        # weights.
        index = context.tp_group.rank() * heads_over.size() + heads_over.rank()
        self.first_head = index * (config.num_attention_heads // divisions)
        # Megatron's scaling against overflow in float16: scores are divided, and multiplied again within the softmax.
        self.divisor = layer_number + 1 if config.apply_query_key_layer_scaling else 1
        self.window = None if window_size is None or window_size[0] < 0 else window_size[0] + 1
        self.chunk = config.chunk_of_layer(layer_number)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, context: SequenceContext, sinks: Tensor | None = None
    ) -> Tensor:
        """Compute attention; a mask in ``context`` replaces the causal mask, but not the window."""
        documents = context.documents
        # Kernels compute neither, but may bound scores themselves.
        needs_weights = self.dropout.active or sinks is not None
        by_formula = self.by_formula or needs_weights
        plain = documents is None and context.attention_mask is None and not by_formula
        # A window that is as long as the sequence hides nothing, and permits the faster kernels.
        every_key = self.window is None or self.window >= len(key)
        if plain and every_key and has_native_attention(query, key, value, self.backend):
            return causal_attention(query, key, value)
        # ``[b, heads, s, d]``: views, because kernels take strides.
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        fused = None
        if self.kernel is not None and context.attention_mask is None and not (self.unfused or needs_weights):
            fused = self.kernel(self, query, key, value, documents)
        if fused is not None:
            out = fused
        elif self.unfused or (by_formula and context.attention_mask is not None):
            out = self.by_reference(query, key, value, context, sinks=sinks)
        elif context.attention_mask is not None:
            out = _masked_attention(query, key, value, _masked(context), self.window)
        else:
            causal: Attend = partial(causal_products, window=self.window)
            attend = partial(self._by_blocks, context=context, sinks=sinks) if by_formula else causal
            if documents is None:
                out = attend(query, key, value, TokenSpan())
            else:
                out = attention_by_documents(query, key, value, documents.lengths, attend)
        return out.permute(2, 0, 1, 3).flatten(2)

    def by_reference(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        context: SequenceContext,
        hidden: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Evaluate the attention formula step by step.

        ``hidden``: True where a query must not attend to a key; it includes window and causality.
        """
        key, value = self._of_every_head(query, key, value)
        weights = self._weights(
            query,
            key,
            _masked(context) if hidden is None else hidden,
            causal=hidden is None and (context.attention_mask is None or context.documents is not None),
            window=self.window if hidden is None else None,
            sinks=sinks,
        )
        positions = {"position_ids": context.positions, "key_positions": context.positions}
        return self.dropout(weights, context.sample_index, first_head=self.first_head, **positions).matmul(value)

    def _by_blocks(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        span: TokenSpan,
        *,
        context: SequenceContext,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Evaluate the formula for blocks of queries, each over the keys that it can see.

        Half of the reference's weights are 0, and its memory traffic is larger. Measured on one core, 8 heads of 64
        channels, dropout of 0.1, forward and backward: 97 ms instead of 233 for 1024 tokens, 319 instead of 916 for
        2048 (blocks of 128: 342, of 512: 337), and 78 instead of 889 for 8 documents of 256 tokens.
        """
        key, value = self._of_every_head(query, key, value)
        # Packed documents call this for one sequence at a time.
        samples = context.sample_index
        if samples is not None and span.sample is not None:
            samples = samples[span.sample : span.sample + 1]
        outputs = []
        stop = key.shape[2] - query.shape[2]
        for block in query.split(QUERY_BLOCK, dim=2):
            start = stop
            stop += block.shape[2]
            # Keys before the window of the block's first query are hidden from all of its queries.
            first = 0 if self.window is None else max(start + 1 - self.window, 0)
            weights = self._weights(block, key[:, :, first:stop], causal=True, window=self.window, sinks=sinks)
            if self.dropout.active:
                numbers = {
                    "position_ids": _positions(context, span.start + start, span.start + stop, query.device),
                    "key_positions": _positions(context, span.start + first, span.start + stop, query.device),
                }
                weights = self.dropout(weights, samples, first_head=self.first_head, **numbers)
            outputs.append(weights.matmul(value[:, :, first:stop]))
        return torch.cat(outputs, dim=2)

    def _of_every_head(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values repeated for the query heads of their groups."""
        count = query.shape[1] // key.shape[1]
        return key.repeat_interleave(count, dim=1), value.repeat_interleave(count, dim=1)

    def _weights(
        self,
        query: Tensor,
        key: Tensor,
        mask: Tensor | None = None,
        *,
        causal: bool,
        window: int | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Return the attention weights ``[b, heads, s, t]`` before dropout, without those of ``sinks``."""
        query = query if self.divisor == 1 else query / self.divisor
        scores = query.matmul(key.transpose(-1, -2))
        scale = self.divisor / math.sqrt(query.shape[-1])
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores * (scale / self.softcap))
            scale = 1.0
        softmax = partial(attention_softmax, scale=scale, causal=causal, backend=self.backend)
        if sinks is None:
            return softmax(scores, mask, window=window)
        # The sink is a key before all others, which every query sees.
        if window is not None:
            outside = ~_visible(scores.shape[-2], scores.shape[-1], window, scores.device)
            mask = outside[None, None] if mask is None else mask | outside
        # Divided, because the softmax multiplies all of its inputs by the scale.
        column = (sinks.to(scores.dtype) / scale).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        mask = None if mask is None else nn.functional.pad(mask.expand(*mask.shape[:-1], scores.shape[-1]), (1, 0))
        # The sink's own weight is dropped: its value is 0, and only the sum of the exponentials needs it.
        return softmax(torch.cat([column, scores], dim=-1), mask)[..., 1:]


def _positions(context: SequenceContext, start: int, stop: int, device: torch.device) -> Tensor | None:
    """Return the positions of some tokens in their whole sequences; None for 0, 1, 2, ..., which kernels count."""
    if context.positions is not None:
        return context.positions[start:stop]
    return torch.arange(start, stop, device=device) if start else None


WITHOUT_PLANS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Kernels of torch other than cuDNN's, which makes a plan for each new shape."""


def kernels_for(query: Tensor) -> AbstractContextManager[object]:
    """Exclude cuDNN for a single query on a GPU: in generation the keys get longer with every token."""
    if not query.is_cuda or query.shape[2] > 1 or torch.compiler.is_compiling():
        return nullcontext()
    return sdpa_kernel(WITHOUT_PLANS)


def fused_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *, causal: bool = False
) -> Tensor:
    """Call torch's attention; ``mask`` broadcasts to ``[b, heads, s, t]``.

    A bool mask is True where a query attends to a key; a floating-point mask is added to the scores.
    """
    # A dictionary, not a comparison: under torch.compile sizes may be symbols, and the operator takes no symbolic bool.
    sharing = {"enable_gqa": True} if query.shape[1] != key.shape[1] else {}
    channels = value.shape[-1]
    if sharing and query.shape[2] == 1 and not causal:  # 15 % faster on a CPU: one pass over the keys per group
        queries = query.flatten(1, 2).unflatten(1, (key.shape[1], -1))
        return fused_attention(queries, key, value, mask).flatten(1, 2).unsqueeze(2)
    # The kernels without full scores need equal widths, on a GPU those for 16 bits (flash attention).
    if channels < query.shape[-1] and (query.is_cpu or query.dtype.itemsize == 2):
        value = nn.functional.pad(value, (0, query.shape[-1] - channels))
    with kernels_for(query):
        out = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal, **sharing)
    return out[..., :channels]


def causal_products(query: Tensor, key: Tensor, value: Tensor, span: TokenSpan, *, window: int | None) -> Tensor:
    """Compute causal attention; the last query attends to all keys, or to the last ``window`` keys."""
    queries = query.shape[2]
    keys = key.shape[2]
    # One new token sees all stored keys: no mask.
    if queries == 1:
        first = 0 if window is None else max(keys - window, 0)
        return fused_attention(query, key[:, :, first:], value[:, :, first:])
    if queries == keys:
        if window is None or window >= keys:
            return fused_attention(query, key, value, causal=True)
        # Otherwise blocks would read about as many keys as the whole triangle.
        if keys > 2 * window:
            return _attention_by_blocks(query, key, value, window)
    return fused_attention(query, key, value, _visible(queries, keys, window, query.device))


def _attention_by_blocks(query: Tensor, key: Tensor, value: Tensor, window: int) -> Tensor:
    """Compute attention of each block of ``window`` queries over the keys of its own and the previous block.

    Memory and work are O(s * window) instead of O(s^2).
    """
    # The first block has no previous one.
    first = fused_attention(*(x[:, :, :window] for x in (query, key, value)), causal=True)
    batch, _, length, _ = query.shape

    def blocks(x: Tensor) -> Tensor:  # [b, heads, s, d] -> [b, blocks, heads, window, d], the last one padded
        padded = nn.functional.pad(x, (0, 0, 0, -length % window))
        return padded.unflatten(2, (-1, window)).transpose(1, 2)

    query, key, value = (blocks(x) for x in (query, key, value))
    key, value = (torch.cat([x[:, :-1], x[:, 1:]], dim=3).flatten(0, 1) for x in (key, value))
    visible = _visible(window, 2 * window, window, query.device)
    later = fused_attention(query[:, 1:].flatten(0, 1), key, value, visible).unflatten(0, (batch, -1))
    return torch.cat([first, later.transpose(1, 2).flatten(2, 3)[:, :, : length - window]], dim=2)


def attention_by_documents(
    query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[Sequence[int]], attend: Attend
) -> Tensor:
    """Apply ``attend`` to each document of each sequence: memory is O(s), work O(sum of squared document lengths).

    Short documents do not use a mask either. Measured on one core, s = 2048, 8 heads of 64 channels, forward and
    backward: 347 to 357 ms with any mask; by documents 215 ms for 1 document, 47 ms for 8, 18 ms for 32, 24 ms for 512
    and 57 ms for 2048 documents of one token.
    """
    outputs = []
    # The backward of split concatenates all gradients once; the backward of each slice would fill a whole tensor.
    rows = zip(query.split(1), key.split(1), value.split(1), lengths, strict=True)
    for number, (*sequence, document_lengths) in enumerate(rows):
        documents = zip(
            *(x.split(document_lengths, dim=2) for x in sequence), accumulate(document_lengths, initial=0), strict=False
        )
        outputs.append(torch.cat([attend(q, k, v, TokenSpan(number, start)) for q, k, v, start in documents], dim=2))
    return torch.cat(outputs)


def _masked_attention(query: Tensor, key: Tensor, value: Tensor, masked: Tensor | None, window: int | None) -> Tensor:
    """Compute attention with ``masked`` (True: no attention to this key); the window also applies."""
    assert masked is not None, "without a mask attention is causal"
    visible = ~masked
    if window is not None:
        visible = visible & _visible(query.shape[2], key.shape[2], window, query.device)
    return fused_attention(query, key, value, visible)


def _masked(context: SequenceContext) -> Tensor | None:
    """Return a mask, True where a query must not attend to a key; None if attention is only causal."""
    documents = None if context.documents is None else context.documents.masked
    if context.attention_mask is None:
        return documents
    return context.attention_mask if documents is None else context.attention_mask | documents


def _visible(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """Return ``[queries, keys]``, True for each query's own key and the keys before it, at most ``window`` keys.

    The last query and the last key have the same position.
    """
    last_diagonal = keys - queries
    seen = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(last_diagonal)
    return seen if window is None else seen.triu(last_diagonal - window + 1)
