"""The optimizer against AdamW written out, and the norm against a sum over all elements."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_core.optimizer.clip import clip_factor
from megatron_core.training.step import train_step
from tests.runs import tiny_run


def _written_out(weight, grads, *, lr, decay, beta1, beta2, eps):
    """AdamW, Loshchilov and Hutter 2019, algorithm 2."""
    mean = square = torch.zeros_like(weight)
    for t, grad in enumerate(grads, 1):
        mean = beta1 * mean + (1 - beta1) * grad
        square = beta2 * square + (1 - beta2) * grad**2
        weight = weight - lr * decay * weight
        weight = weight - lr * (mean / (1 - beta1**t)) / ((square / (1 - beta2**t)).sqrt() + eps)
    return weight


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_adamw_is_the_papers(backend: str) -> None:
    settings = {"lr": 0.01, "weight_decay": 0.1, "adam_beta1": 0.8, "adam_beta2": 0.9, "adam_eps": 1e-6}
    run = tiny_run(fp64=True, clip_grad=0.0, kernel_backend=backend, **settings)
    buckets = run.data_parallel.buckets
    start = [bucket.weights.clone() for bucket in buckets]
    grads: list[list[torch.Tensor]] = [[] for _ in buckets]
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        for bucket, seen in zip(buckets, grads, strict=True):
            bucket.grads.copy_(torch.randn(bucket.grads.shape, generator=generator))
            seen.append(bucket.grads.clone())
        run.optimizer.step(0.01, run.optimizer.gradient_norm().item())
    for bucket, weight, seen in zip(buckets, start, grads, strict=True):
        decay = 0.1 if bucket.kind.decay else 0.0
        expected = _written_out(weight, seen, lr=0.01, decay=decay, beta1=0.8, beta2=0.9, eps=1e-6)
        torch.testing.assert_close(bucket.weights, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_norm_and_clipping(backend: str) -> None:
    run = tiny_run(fp64=True, clip_grad=0.5, kernel_backend=backend)
    for bucket in run.data_parallel.buckets:
        bucket.grads.fill_(0.25)
    elements = sum(p.numel() for stage in run.stages.values() for p in stage.parameters())
    padding = 3 * 32  # rows of the padded vocabulary: allocated, but not part of the model
    norm = run.optimizer.gradient_norm().item()
    assert not run.optimizer.step(0.0, norm)
    assert norm == pytest.approx(0.25 * math.sqrt(elements - padding), rel=1e-12)
    clipped = run.optimizer.shards[0].state["exp_avg"][0].item() / (1 - run.config.optimizer.adam_beta1)
    assert clipped == pytest.approx(0.25 * 0.5 / norm, rel=1e-5)


@pytest.mark.parametrize(("norm", "limit", "factor"), [(2.0, 1.0, 0.5), (0.5, 1.0, 1.0), (9.0, 0.0, 1.0)])
def test_clip_factor(norm: float, limit: float, factor: float) -> None:
    assert clip_factor(norm, limit) == pytest.approx(factor, rel=1e-5)


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_main_weights_keep_what_bfloat16_cannot(backend: str) -> None:
    """Updates far below a bfloat16 step still accumulate in the main weights, and the model's are their roundings."""
    run = tiny_run(bf16=True, lr=1e-6, weight_decay=0.0, lr_decay_style="constant", kernel_backend=backend)
    before = [shard.main.clone() for shard in run.optimizer.shards]
    for _ in range(3):
        train_step(run)
    for start, shard in zip(before, run.optimizer.shards, strict=True):
        moved = (shard.main - start).abs().max().item()
        assert 0 < moved < 1e-5
        assert torch.equal(shard.bucket.weight_shard, shard.main.bfloat16())
