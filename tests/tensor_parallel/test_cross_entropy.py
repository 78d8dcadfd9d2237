"""The split cross entropy against ``F.cross_entropy`` in float64."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from megatron_core.errors import LayoutError
from megatron_core.parallel.groups import Group, LocalGroup
from megatron_core.tensor_parallel import vocab_parallel_cross_entropy
from megatron_core.verify.ranks import run_ranks

S, B = 5, 3
EXACT = {"rtol": 1e-11, "atol": 1e-12}


def _case(vocab: int, padded: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logits with garbage in the padding, targets that include both ends, gradients of the losses."""
    generator = torch.Generator().manual_seed(vocab)
    logits = 3 * torch.randn(S, B, padded, dtype=torch.float64, generator=generator)
    logits[..., vocab:] = torch.inf
    target = torch.randint(0, vocab, (S, B), generator=generator)
    target[0, 0], target[-1, -1] = 0, vocab - 1
    return logits, target, torch.randn(S, B, dtype=torch.float64, generator=generator)


def _check(group: Group, vocab: int, padded: int, smoothing: float) -> None:
    logits, target, grad_loss = _case(vocab, padded)
    true = logits[..., :vocab].clone().requires_grad_()
    expected = F.cross_entropy(true.flatten(0, 1), target.flatten(), reduction="none", label_smoothing=smoothing)
    expected.backward(grad_loss.flatten())

    mine = logits.chunk(group.size(), -1)[group.rank()].contiguous().requires_grad_()
    loss = vocab_parallel_cross_entropy(mine, target, smoothing, group, vocab_size=vocab)
    torch.testing.assert_close(loss, expected.view(S, B), **EXACT)
    loss.backward(grad_loss)
    whole = F.pad(true.grad, (0, padded - vocab))
    torch.testing.assert_close(mine.grad, whole.chunk(group.size(), -1)[group.rank()], **EXACT)
    held = min(max(vocab - group.rank() * mine.shape[-1], 0), mine.shape[-1])
    assert torch.equal(mine.grad[..., held:], torch.zeros_like(mine.grad[..., held:])), "gradient of padding"


def _check_all() -> None:
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    pair = pairs[dist.get_rank() % 2]
    for smoothing in (0.0, 0.1):
        _check(dist.group.WORLD, 32, 32, smoothing)
        _check(dist.group.WORLD, 30, 32, smoothing)  # C21
        _check(dist.group.WORLD, 17, 32, smoothing)  # the last rank has only padding
        _check(dist.group.WORLD, 16, 32, smoothing)  # two ranks have
        _check(pair, 13, 16, smoothing)  # C50


def test_split_cross_entropy_is_the_cross_entropy() -> None:  # C20
    run_ranks(4, _check_all)


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize(("vocab", "padded"), [(7, 7), (7, 16)])
def test_on_one_rank(vocab: int, padded: int, smoothing: float) -> None:
    _check(LocalGroup(), vocab, padded, smoothing)


def _check_extremes() -> None:
    """Logits whose exponentials overflow or underflow on one rank or on all."""
    group = dist.group.WORLD
    for offset in (0.0, 1e4, -1e4, 3e38):
        logits = torch.tensor([[offset, -80.0, -90.0, -100.0], [offset, offset, offset, offset]])
        mine = logits.chunk(2, -1)[group.rank()].contiguous().requires_grad_()
        target = torch.tensor([0, 3])
        loss = vocab_parallel_cross_entropy(mine, target, tp_group=group)
        torch.testing.assert_close(loss, F.cross_entropy(logits, target, reduction="none"))
        loss.sum().backward()
        assert mine.grad.isfinite().all()


def test_extreme_logits() -> None:
    run_ranks(2, _check_extremes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    """Losses of 16-bit logits are float32, gradients have the logits' dtype; the logits are not changed."""
    logits = torch.randn(4, 8).to(dtype).requires_grad_()
    before = logits.detach().clone()
    loss = vocab_parallel_cross_entropy(logits, torch.arange(4), tp_group=LocalGroup())
    assert loss.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(loss, F.cross_entropy(logits.to(loss.dtype), torch.arange(4), reduction="none"))
    loss.sum().backward()
    assert logits.grad.dtype == dtype
    assert torch.equal(logits, before)


def test_targets_of_another_shape_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"logits \[12, 1, 8\] and target \[6, 1\]"):
        vocab_parallel_cross_entropy(torch.zeros(12, 1, 8), torch.zeros(6, 1, dtype=torch.int64), tp_group=LocalGroup())
