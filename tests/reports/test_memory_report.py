"""Memory of a rank by formula, compared with the allocations of training."""

from __future__ import annotations

import pytest

from megatron_core.reports.memory_report import describe_memory, planned_bytes
from megatron_core.training.loop import train
from megatron_core.verify.ranks import run_ranks
from tests.runs import tiny_run

KINDS = ("weights", "gradients", "optimizer")
SIZES = {"hidden_size": 64, "ddp_bucket_size": 20_000, "global_batch_size": 8, "micro_batch_size": 1}


def _by_stage() -> list[tuple[float, float, float]]:
    """Planned and measured bytes, and bytes per parameter, at every stage."""
    rows = []
    for stage in range(4):
        run = tiny_run(**SIZES, zero_stage=stage, bf16=True)
        found = sum(size for kind, size in run.state_bytes().items() if kind != "units whole")
        parameters = sum(p.numel() for model in run.stages.values() for p in model.parameters())
        rows.append((planned_bytes(run), found, found / parameters))
    return rows


@pytest.mark.parametrize("copies", [1, 2, 4])
def test_bytes_of_a_rank_follow_the_formula(copies: int) -> None:
    expected = [18, 6 + 12 / copies, 2 + 16 / copies, 18 / copies]
    for rows in run_ranks(copies, _by_stage):
        for (planned, found, each), formula in zip(rows, expected, strict=True):
            assert found == pytest.approx(planned, rel=0.05)
            assert each == pytest.approx(formula, rel=0.05)


def _with_frozen_weights() -> list[tuple[float, int]]:
    """Planned and measured bytes with adapters: frozen weights are whole, at stage 3 divided."""
    runs = [tiny_run(**SIZES, zero_stage=stage, bf16=True, lora_rank=2) for stage in (0, 3)]
    return [(planned_bytes(run), sum(run.state_bytes()[kind] for kind in KINDS)) for run in runs]


@pytest.mark.parametrize("copies", [1, 2])
def test_frozen_weights_are_planned(copies: int) -> None:
    for rows in run_ranks(copies, _with_frozen_weights):
        for planned, found in rows:
            assert found == pytest.approx(planned, rel=0.05)


def test_plan_and_what_came_true_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    run = tiny_run(train_iters=3, eval_iters=0)
    assert "by formula" in describe_memory(run)
    train(run, [])
    said = capsys.readouterr().out
    assert "memory of rank 0 after step 2" in said and "sent: gradients 0 B, weights 0 B" in said
