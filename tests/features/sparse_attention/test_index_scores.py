"""The indexer's scores, choice and loss against loops over the paper's equations."""

from __future__ import annotations

import math

import torch

from megatron_core.features.sparse_attention.attention import (
    index_divergence,
    index_scores,
    not_selected,
    select_keys,
)

GENERATOR = torch.Generator().manual_seed(3)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=GENERATOR)


def test_scores_are_the_equation() -> None:
    query, key, weights = drawn(3, 2, 4, 5), drawn(6, 2, 5), drawn(3, 2, 4)
    found = index_scores(query, key, weights)
    for b in range(2):
        for s in range(3):
            for t in range(6):
                wanted = sum(
                    weights[s, b, h].item()
                    * max(0.0, sum(x * y for x, y in zip(query[s, b, h].tolist(), own, strict=True)))
                    for own in [key[t, b].tolist()]
                    for h in range(4)
                )
                assert math.isclose(found[b, s, t].item(), wanted / math.sqrt(4 * 5), rel_tol=1e-12, abs_tol=1e-14)
    assert index_scores(query.bfloat16(), key.bfloat16(), weights.bfloat16()).dtype == torch.float32


def test_equal_scores_select_the_lower_position() -> None:
    """Zeros of relu, for example; hidden keys count only if there is no other."""
    scores = torch.tensor([[[0.0, 2.0, 0.0, -1.0, 0.0, 2.0]]])
    hidden = torch.tensor([[[False, False, False, False, False, True]]])
    assert select_keys(scores, hidden, 3).tolist() == [[[1, 0, 2]]]
    assert select_keys(scores, hidden, 5).tolist() == [[[1, 0, 2, 4, 3]]]
    assert select_keys(scores, hidden, 9).shape[-1] == 6
    many = torch.zeros(1, 1, 5000)  # sorting algorithms for long rows are not stable by themselves
    assert select_keys(many, torch.zeros(1, 1, 1, dtype=torch.bool), 40).flatten().tolist() == list(range(40))
    assert (~not_selected(torch.tensor([[[4, 0]]]), 6)).nonzero()[:, -1].tolist() == [0, 4]


def test_divergence_and_its_gradient_are_the_formula() -> None:
    scores = drawn(1, 2, 4).requires_grad_()
    hidden = torch.tensor([[[False, False, True, True], [False, True, False, False]]])
    target = drawn(1, 2, 4).masked_fill(hidden, -math.inf).softmax(-1)
    target[0, 1] = torch.tensor([1.0, 0.0, 0.0, 0.0])  # a weight of 0 contributes 0
    found = index_divergence(target, scores, hidden)
    for row in range(2):
        seen = [t for t in range(4) if not hidden[0, row, t]]
        total = sum(math.exp(scores[0, row, t].item()) for t in seen)
        wanted = sum(
            target[0, row, t].item() * math.log(target[0, row, t].item() / (math.exp(scores[0, row, t].item()) / total))
            for t in seen
            if target[0, row, t] > 0
        )
        assert math.isclose(found[0, row].item(), wanted, rel_tol=1e-12)
    (gradient,) = torch.autograd.grad(found.sum(), scores)
    torch.testing.assert_close(gradient, scores.masked_fill(hidden, -math.inf).softmax(-1) - target)
