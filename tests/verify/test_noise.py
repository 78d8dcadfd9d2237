"""Rounding errors, measured by sums in other orders."""

from __future__ import annotations

import torch

from megatron_core.config import RunConfig
from megatron_core.planner.layout import Layout
from megatron_core.verify import GPTExperiment, assemble, run_ranks, shrunk
from megatron_core.verify.bounds import Bounds, ReorderedSums, beyond, relative_errors, rounding_noise


def test_other_orders_give_the_same_sums() -> None:
    """Equal up to float64's rounding, but not bitwise; other orders with another seed, and autograd works."""
    a, b, c = (torch.randn(3, 40, 40, dtype=torch.float64, requires_grad=True) for _ in range(3))

    def compute() -> list[torch.Tensor]:
        y = torch.baddbmm(c, a, b) @ b + torch.addmm(c[0], a[0], b[0]).sum(0)
        return [y.detach(), *torch.autograd.grad(y.square().sum(), (a, b, c))]

    plain, found = compute(), []
    for seed in (0, 1):
        with ReorderedSums(seed):
            found.append(compute())
    for expected, first, second in zip(plain, *found, strict=True):
        for other in (first, second):
            torch.testing.assert_close(other, expected, rtol=1e-9, atol=1e-9)
            assert not torch.equal(other, expected)
        assert not torch.equal(first, second)


def test_a_right_layout_stays_far_within_the_noise() -> None:
    """In a single run some weights may be exact by chance although AdamW's division makes them noisy: one run is not
    sufficient."""
    layouts = [Layout.parse("tp2")]
    settings = {"num_layers": 4, "num_attention_heads": 4}
    experiment = GPTExperiment(shrunk(RunConfig.from_flat(settings), layouts), steps=2, few_micro_batches=True)
    baseline = assemble(run_ranks(1, experiment, Layout(), "float64"))
    plain, noise = rounding_noise(experiment, Layout(), "float32", baseline=baseline)
    assert max(noise[name] / plain[name] for name in plain if name.startswith("weight")) > 2.0
    errors = relative_errors(assemble(run_ranks(2, experiment, layouts[0], "float32")), baseline)
    assert list(beyond(errors, Bounds("float32", noise))) == []
    assert list(beyond(errors | {"weight.embedding.word_embeddings.weight": 1e-3}, Bounds("float32", noise)))
