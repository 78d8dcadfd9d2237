"""Linear layers whose bits do not depend on the layout; ``tests/parity/test_layout_invariant.py`` compares layouts."""

from __future__ import annotations

import torch
from torch import nn

from megatron_core.features.equal_bits.invariance import Invariance
from megatron_core.features.equal_bits.linear import Chunks, WeightParts, invariant_grouped_linear


def test_experts_compute_in_the_dtype_of_their_rows() -> None:
    invariance = Invariance(feature_parts=2, chunks=1, sequences=1, sequence_length=5, context_ranks=1)
    parts = WeightParts.even(invariance, 6, 2, splits_output=True)
    chunks = Chunks((slice(0, 2), slice(2, 5)), ((slice(0, 2),), (slice(2, 5),)))
    weight = nn.Parameter(torch.randn(2, 6, 4).bfloat16(), requires_grad=False)
    x = torch.randn(5, 4, requires_grad=True)
    y = invariant_grouped_linear(x, weight, chunks, parts)
    (grad,) = torch.autograd.grad(y, x, torch.ones_like(y))
    wide = weight.float()[[0, 0, 1, 1, 1]]
    assert y.dtype == grad.dtype == torch.float32
    torch.testing.assert_close(y, torch.einsum("roi,ri->ro", wide, x))
    torch.testing.assert_close(grad, wide.sum(1))
