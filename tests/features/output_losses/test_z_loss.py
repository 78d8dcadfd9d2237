"""The z-loss of the output layer: its value and gradients are those of PaLM's formula."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

from megatron_core.config.validate import check
from megatron_core.errors import ConfigError
from megatron_core.features.output_losses.head import cross_entropy_and_log_z
from megatron_core.parallel.groups import ALONE
from megatron_core.training.step import evaluate, train_step
from tests.runs import tiny_config, tiny_run


def test_gradient_is_that_of_autograd() -> None:
    drawn = torch.Generator().manual_seed(1)
    own = torch.randn(5, 3, 24, generator=drawn, dtype=torch.float64).requires_grad_()
    target = torch.randint(0, 21, (5, 3), generator=drawn)
    of_losses, of_log_z = torch.randn(2, 5, 3, generator=drawn, dtype=torch.float64)
    other = own.detach().clone().requires_grad_()
    losses, log_z = cross_entropy_and_log_z(own * 1.0, target, tp_group=ALONE, vocab_size=21)
    ((losses * of_losses).sum() + (log_z * of_log_z).sum()).backward()
    valid = other[..., :21]
    expected = cross_entropy(valid.flatten(0, 1), target.flatten(), reduction="none").view(5, 3)
    torch.testing.assert_close(losses, expected)
    torch.testing.assert_close(log_z, valid.logsumexp(-1))
    ((expected * of_losses).sum() + (valid.logsumexp(-1) * of_log_z).sum()).backward()
    torch.testing.assert_close(own.grad, other.grad)


def test_training_minimises_the_formula() -> None:
    """The value over unmasked tokens from logits; it shrinks; evaluation and the reported loss do not include it."""
    run = tiny_run(output_z_loss_coeff=0.5, fp64=True)
    batch = run.micro_batches(run.loader(run.splits.train).step(0, 4))
    with torch.no_grad():
        log_z = [run.stages[0](each.tokens).logsumexp(-1).square() * each.loss_mask for each in batch]
    expected = sum(each.sum() for each in log_z) / sum(each.loss_mask.sum() for each in batch)
    before = evaluate(run, run.splits.train, 1)
    results = [train_step(run) for _ in range(8)]
    assert results[0].auxiliary_losses["output_z_loss"] == pytest.approx(expected.item(), rel=1e-9)
    assert results[0].loss == pytest.approx(before, rel=1e-12)
    plain = tiny_run(fp64=True)
    assert train_step(plain).grad_norm != pytest.approx(results[0].grad_norm, rel=1e-3)
    assert results[-1].auxiliary_losses["output_z_loss"] < 0.9 * results[0].auxiliary_losses["output_z_loss"]


def test_contradictions() -> None:
    settings = {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "linear"}
    with pytest.raises(ConfigError, match="cannot be used with cross_entropy_fusion_impl"):
        check(tiny_config(output_z_loss_coeff=0.1, **settings), 1)
