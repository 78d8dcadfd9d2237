"""Dropout whose mask is a pure function of what it falls on, and of nothing else.

No generator is read, so the layout, the number of micro-batches, recomputation and a resume cannot change the mask, and
nothing has to be saved. ``megatron_core.ops.reference.dropout`` says how it is drawn.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_core.ops import Backend, bias_dropout_add
from megatron_core.parallel.sharding import name_seed


class KeyedDropout(torch.nn.Module):
    """x -> residual + keep (x + bias) / (1 - p), where keep depends on what each element belongs to.

    ``place`` names the dropout in the model (as ``layers.3.attention``), ``p`` is the probability to drop.
    """

    def __init__(self, p: float, seed: int, place: str, backend: Backend = "auto") -> None:
        super().__init__()
        self.p = p
        self.key = name_seed(seed, f"dropout:{place}")
        self.backend = backend

    @property
    def active(self) -> bool:
        """Whether anything is dropped: in training, with p above 0."""
        return self.training and self.p > 0.0

    def forward(
        self,
        x: Tensor,
        sample_index: Tensor | None,
        *,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        first_position: int = 0,
        first_head: int = 0,
    ) -> Tensor:
        """Drop elements of ``x``, which is ``[s, b, h]`` and begins at ``first_position`` of the sequence, or attention
        weights ``[b, heads, s, t]`` that begin at ``first_head``; ``sample_index`` ``[b]`` is the sequences' numbers.

        ``bias`` is added before, ``residual`` after it, also where nothing is dropped.
        """
        p = self.p if self.active else 0.0
        return bias_dropout_add(
            x, bias, residual, p, self.key, sample_index, first_position, first_head, backend=self.backend
        )
