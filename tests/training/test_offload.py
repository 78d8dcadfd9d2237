"""Offload of activations to CPU memory, and changes of the schedule in a resumed run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_core.errors import CheckpointError
from megatron_core.features.offload import activations as offload
from megatron_core.training.step import train_step
from megatron_core.verify.ranks import run_ranks
from tests.runs import tiny_run

FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
PP2 = {"pipeline_model_parallel_size": 2, "num_layers": 4}


def _losses(settings: dict) -> tuple[list[float], int]:
    """Losses, and bytes copied to the host: here every tensor counts as a device's."""
    moved = []
    offload.is_on_host = lambda tensor: False

    def empty_on_host(tensor: torch.Tensor) -> torch.Tensor:
        moved.append(tensor.nbytes)
        return torch.empty_like(tensor)

    offload.empty_on_host = empty_on_host
    run = tiny_run(hidden_dropout=0.1, **settings)
    return [train_step(run).loss for _ in range(2)], sum(moved)


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    "settings", [{}, {"zero_stage": 3}, PP2, FULL], ids=["plain", "zero3", "pp2", "full recompute"]
)
def test_offloaded_activations_change_no_bit(settings: dict) -> None:
    plain = run_ranks(2, _losses, settings)
    sizes = []
    for layers in (1, 2):
        away = run_ranks(2, _losses, settings | {"cpu_offloading": True, "cpu_offloading_num_layers": layers})
        assert [losses for losses, _ in away] == [losses for losses, _ in plain]
        sizes.append(away[0][1])
    assert 0 == plain[0][1] < sizes[0]
    assert sizes[1] == 2 * sizes[0], "layers are alike, and their weights stay"


def test_another_schedule_has_to_be_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tiny_run(save=str(tmp_path))
    train_step(run)
    run.saver.save(run.state)
    changed = {"load": str(tmp_path), "lr": 5e-3, "lr_warmup_iters": 2}
    with pytest.raises(CheckpointError, match=r"lr was 0.01 and is 0.005; lr_warmup_iters was 0 and is 2.*--override"):
        tiny_run(**changed)
    resumed = tiny_run(**changed, override_opt_param_scheduler=True)
    assert "lr was 0.01 and is 0.005" in capsys.readouterr().out
    assert train_step(resumed).learning_rate == pytest.approx(5e-3)
    assert tiny_run(load=str(tmp_path), lr=5e-3, finetune=True).state.iteration == 0


def test_a_last_step_that_moves_the_learning_rate_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tiny_run(save=str(tmp_path), train_iters=4, lr_decay_style="linear")
    train_step(run)
    run.saver.save(run.state)
    for settings, told in (({}, True), ({"lr_decay_iters": 4}, False), ({"train_iters": 4}, False)):
        tiny_run(**({"load": str(tmp_path), "train_iters": 8, "lr_decay_style": "linear"} | settings))
        assert ("train_iters was 4 and is 8" in capsys.readouterr().out) == told
