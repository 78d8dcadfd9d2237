"""The largest attention logit of each head in a step, for QK-clip."""

import math
from itertools import accumulate

import torch
from torch import Tensor

from megatron_core.config.attention import QUERY_BLOCK
from megatron_core.ops.rows import copied_to
from megatron_core.parallel.collectives import start_gather_sequence
from megatron_core.parallel.groups import Group
from megatron_core.transformer.context import PackedDocuments, SequenceContext


class MaxLogits:
    """Records max q k / sqrt(d) over the keys that each query sees, in all micro-batches since ``reset``.

    Fused kernels do not return it, so the scores are computed a second time, for blocks of queries, without gradients.
    ``group``: the ranks that share each sequence. ``window``: keys that a query sees, None for all.
    """

    def __init__(self, heads: int, device: torch.device, group: Group, window: int | None) -> None:
        self.group = group
        self.window = window
        self.largest = torch.full((heads,), -math.inf, dtype=torch.float64, device=device)
        """``[heads]``: of this rank's heads and queries."""

    def reset(self) -> None:
        """Begin a step."""
        self.largest.fill_(-math.inf)

    @torch.no_grad()
    def record(self, query: Tensor, key: Tensor, context: SequenceContext) -> None:
        """Add the logits of queries ``[s, b, heads, d]`` and keys ``[s, b, groups, d]`` of this rank's tokens."""
        positions = context.positions
        if positions is None:
            positions = torch.arange(len(query), device=query.device)
        key, handle = start_gather_sequence(key.detach(), self.group)
        of_keys, other = start_gather_sequence(positions, self.group)
        handle.wait()
        other.wait()
        documents = None if context.documents is None else _numbers(context.documents, len(of_keys))
        key = key.repeat_interleave(query.shape[2] // key.shape[2], dim=2).permute(1, 2, 3, 0)
        for block, of_queries in zip(query.detach().split(QUERY_BLOCK), positions.split(QUERY_BLOCK), strict=True):
            scores = block.permute(1, 2, 0, 3) @ key / math.sqrt(query.shape[-1])
            distance = of_queries[:, None] - of_keys
            hidden = distance < 0 if self.window is None else (distance < 0) | (distance >= self.window)
            hidden = hidden[None]
            if documents is not None:
                hidden = hidden | (documents[:, of_queries, None] != documents[:, None, of_keys])
            if context.attention_mask is not None:
                hidden = hidden | context.attention_mask[:, 0][:, of_queries][:, :, of_keys]
            largest = scores.masked_fill(hidden[:, None], -math.inf).amax((0, 2, 3))
            self.largest = torch.maximum(self.largest, largest.to(self.largest.dtype))


def _numbers(documents: PackedDocuments, length: int) -> Tensor:
    """The number of the document of each token, ``[b, length]``."""
    numbers = torch.zeros(len(documents.lengths), length, dtype=torch.int64, device=documents.device)
    for row, lengths in zip(numbers, documents.lengths, strict=True):
        row[copied_to(list(accumulate(lengths))[:-1], torch.int64, row.device)] = 1
    return numbers.cumsum(1)
