"""Weights and moments in bfloat16: rounded without bias, equally in every layout, and close to float32 in training."""

from __future__ import annotations

import pytest
import torch

from megatron_core.config import OptimizerConfig
from megatron_core.features.bf16_state.rounding import element_numbers, round_stochastically
from megatron_core.optimizer.algorithms import AdamW
from megatron_core.optimizer.rule import Rates, ShardSlice
from megatron_core.parallel.sharding import ShardSpec, split, split_fused, split_qkv
from megatron_core.training.step import train_step
from megatron_core.verify.ranks import run_ranks
from tests.optimizer.test_algorithms import ROUNDED
from tests.runs import tiny_run


def test_values_are_rounded_to_neighbours_and_right_on_average() -> None:
    for value in (1.0 + 2**-10, -3.14159, 1e-30, 0.0, 2.5):
        rounded = round_stochastically(torch.full((200_000,), value), torch.arange(200_000), 5).float()
        spacing = max(abs(value) * 2**-7, 1e-38)
        assert (rounded - value).abs().max() < spacing
        assert abs(rounded.mean().item() - value) < 4 * spacing / 2 / 200_000**0.5
    special = torch.tensor([float("inf"), float("-inf"), float("nan")])
    torch.testing.assert_close(
        round_stochastically(special, torch.arange(3), 5), special.bfloat16(), rtol=0, atol=0, equal_nan=True
    )


def test_draws_depend_on_seed_and_element_alone() -> None:
    values = torch.randn(1000)
    whole = round_stochastically(values, torch.arange(1000), 5)
    assert torch.equal(round_stochastically(values[300:], torch.arange(300, 1000), 5), whole[300:])
    assert not torch.equal(round_stochastically(values, torch.arange(1000), 6), whole)


@pytest.mark.parametrize(
    "spec",
    [
        split((7, 5), 0, 1, 2, padded=8),
        split((6, 8), 1, 1, 2),
        split_fused((12, 3), (6, 6), 1, 2),
        split_qkv((24, 5), 4, 2, 3, 1, 4),
    ],
)
def test_element_numbers_are_those_of_the_global_tensor(spec: ShardSpec) -> None:
    whole = torch.arange(spec.global_shape[0] * spec.global_shape[1]).view(spec.global_shape)
    local = torch.empty(spec.local_shape, dtype=torch.int64)
    spec.localise(whole, local)
    numbers = element_numbers(spec, 2, local.numel(), torch.device("cpu"))
    for part in spec.parts:
        held = torch.zeros(spec.local_shape, dtype=torch.bool)
        held[part.local.index] = True
        at = held.view(-1)[2:]
        assert torch.equal(numbers[at], local.view(-1)[2:][at])


def test_second_moments_decay_on_average() -> None:
    """With rounding to nearest, 1 times 0.999 would be 1 forever."""
    moments = torch.ones(20_000, dtype=torch.bfloat16)
    algorithm = AdamW(OptimizerConfig(adam_beta2=0.999), "reference")
    for step in range(1, 301):
        wide = moments.float()
        zeros = torch.zeros_like(wide)
        algorithm.update(
            [ShardSlice(zeros, zeros.clone(), None, {"exp_avg": zeros.clone(), "exp_avg_sq": wide})],
            Rates(step, 0.0, 0.0, 1.0),
        )
        moments = round_stochastically(wide, torch.arange(len(wide)), step)
    assert moments.float().mean().item() == pytest.approx(0.999**300, rel=2e-3)


def _losses(variants: list[dict]) -> list[list[float]]:
    found = []
    for settings in variants:
        run = tiny_run(**settings)
        found.append([train_step(run).loss for _ in range(4)])
    return found


def test_zero_stages_and_offload_round_alike(tmp_path) -> None:
    once = ROUNDED | {"micro_batch_size": 4, "clip_grad": 0.0, "ddp_bucket_size": 5000}
    variants = [{}, {"zero_stage": 1}, {"zero_stage": 3}, {"optimizer_offload_dir": str(tmp_path)}]
    for losses in run_ranks(2, _losses, [once | each for each in variants]):
        assert losses == [losses[0]] * len(variants)


@pytest.mark.whole_matrix
def test_training_is_close_to_that_with_main_weights() -> None:
    settings = {"bf16": True, "lr": 1e-2, "lr_decay_style": "constant", "train_iters": 40}
    plain, rounded = (tiny_run(**settings | own) for own in ({}, ROUNDED))
    sizes = [sum(t.nbytes for _, named in run.optimizer.tensors() for t in named.values()) for run in (plain, rounded)]
    assert sizes[1] * 3 == sizes[0]
    pairs = [(train_step(plain).loss, train_step(rounded).loss) for _ in range(30)]
    assert pairs[-1][0] < pairs[0][0] - 0.02
    assert all(abs(a - b) < 0.02 for a, b in pairs)
