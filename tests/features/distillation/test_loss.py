"""The split distillation loss against softmax and KL divergence of whole logits in float64."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from megatron_core.errors import LayoutError
from megatron_core.features.distillation import loss as distillation
from megatron_core.features.distillation.loss import vocab_parallel_distillation_loss
from megatron_core.parallel.groups import Group, LocalGroup
from megatron_core.verify.ranks import run_ranks
from tests.defects.plant import planted

S, B = 5, 3
EXACT = {"rtol": 1e-11, "atol": 1e-12}
SETTINGS = ((1.0, 1.0), (0.3, 2.5), (0.0, 3.0))


def plain_loss(z: Tensor, u: Tensor, target: Tensor, weight: float, heat: float) -> tuple[Tensor, Tensor]:
    """The loss and T^2 KL of each token, from whole logits ``[..., V]`` of student and teacher."""
    ce = F.cross_entropy(z.flatten(0, -2), target.flatten(), reduction="none").view(target.shape)
    kl = F.kl_div((z / heat).log_softmax(-1), (u / heat).log_softmax(-1), reduction="none", log_target=True).sum(-1)
    return (1 - weight) * ce + weight * heat**2 * kl, heat**2 * kl


def _check(group: Group, vocab: int, padded: int, weight: float, heat: float) -> None:
    generator = torch.Generator().manual_seed(vocab)
    z, u = (4 * torch.randn(S, B, padded, dtype=torch.float64, generator=generator) for _ in range(2))
    target = torch.randint(0, vocab, (S, B), generator=generator)
    grad = torch.randn(S, B, dtype=torch.float64, generator=generator)
    z[..., vocab:] = u[..., vocab:] = torch.inf
    true = z[..., :vocab].clone().requires_grad_()
    expected, divergence = plain_loss(true, u[..., :vocab], target, weight, heat)
    expected.backward(grad)

    mine, theirs = (each.chunk(group.size(), -1)[group.rank()].contiguous() for each in (z, u))
    mine.requires_grad_()
    settings = {"weight": weight, "temperature": heat, "tp_group": group, "vocab_size": vocab}
    losses, own = vocab_parallel_distillation_loss(mine * 1, theirs, target, **settings)
    torch.testing.assert_close((losses, own), (expected, divergence.detach()), **EXACT)
    losses.backward(grad)
    whole = F.pad(true.grad, (0, padded - vocab))
    torch.testing.assert_close(mine.grad, whole.chunk(group.size(), -1)[group.rank()], **EXACT)


def _check_all() -> None:
    for weight, heat in SETTINGS:
        _check(dist.group.WORLD, 30, 32, weight, heat)
        _check(dist.group.WORLD, 15, 32, weight, heat)  # the last rank has only padding


def test_split_loss_is_that_of_whole_logits() -> None:
    run_ranks(2, _check_all)


@pytest.mark.every_case
@pytest.mark.parametrize(("weight", "heat"), SETTINGS)
def test_a_few_rows_at_a_time(weight: float, heat: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distillation, "MAX_BYTES", 400)
    _check(LocalGroup(), 21, 24, weight, heat)


def test_half_precision_has_wide_losses() -> None:
    z, u = (torch.randn(4, 2, 16).bfloat16() for _ in range(2))
    target = torch.zeros(4, 2, dtype=torch.long)
    settings = {"weight": 0.5, "temperature": 2.0, "tp_group": LocalGroup(), "vocab_size": 16}
    expected, _ = plain_loss(z.double(), u.double(), target, 0.5, 2.0)
    losses, _ = vocab_parallel_distillation_loss(z, u, target, **settings)
    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("target", "old", "new"),
    [
        ("_Columns.joined", "soft_sum * ((largest - top) / heat).exp()", "soft_sum"),
        ("_Columns.joined", "(mean * factor).sum(0)", "mean.sum(0)"),
        ("_Columns.targets", "& (target < self.first + self.valid)", ""),
        ("_Columns.write_gradient", "self.weight * heat", "self.weight"),
    ],
)
def test_the_comparison_finds_defects(target: str, old: str, new: str) -> None:
    with planted(f"features.distillation.loss:{target}", old, new), pytest.raises(Exception, match=r"rank|index"):
        run_ranks(2, _check_all)


def test_other_shapes_are_refused() -> None:
    z, u = torch.zeros(4, 2, 16), torch.zeros(4, 2, 8)
    settings = {"weight": 1.0, "temperature": 1.0, "tp_group": LocalGroup(), "vocab_size": 16}
    with pytest.raises(LayoutError, match=r"teacher_logits \[4, 2, 8\]"):
        vocab_parallel_distillation_loss(z, u, torch.zeros(4, 2, dtype=torch.long), **settings)


@pytest.mark.parametrize("heat", [0.01, 1.0, 100.0])
@pytest.mark.parametrize("distance", [0.0, 0.1])
def test_divergence_in_float32(heat: float, distance: float) -> None:
    """T^2 KL is a small difference of large numbers; it is not negative, also for equal logits."""
    generator = torch.Generator().manual_seed(0)
    z = 4 * torch.randn(64, 1, 1000, generator=generator)
    u = z + distance * torch.randn(64, 1, 1000, generator=generator)
    target = torch.zeros(64, 1, dtype=torch.int64)
    settings = {"weight": 1.0, "temperature": heat, "tp_group": LocalGroup(), "vocab_size": 1000}
    losses, divergence = vocab_parallel_distillation_loss(z.clone(), u, target, **settings)
    _, expected = plain_loss(z.double(), u.double(), target, 1.0, heat)
    assert divergence.dtype == torch.float32 and torch.equal(losses, divergence) and divergence.min() >= 0
    # Rounding of the logits alone changes T^2 KL by about T times 1e-7.
    torch.testing.assert_close(divergence.double(), expected, rtol=1e-3, atol=1e-6 * heat)
