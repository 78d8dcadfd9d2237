"""Monitors, wall-clock times, the profile of FLOPs and torch.autocast of DeepSpeed's JSON."""

from __future__ import annotations

import csv
import io
import logging
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.profiling.flops_profiler import flops_to_string, get_model_profile
from deepspeed.translation import translate
from megatron_core.errors import ConfigError
from megatron_core.verify.ranks import run_ranks

WIDTH, BATCH, STEPS = 8, 4, 3


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def _batch(step: int) -> torch.Tensor:
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))


def _trained(**keys: Any) -> tuple[Any, list[float]]:
    config = {"train_batch_size": BATCH, "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "eps": 1e-4}}, **keys}
    engine = deepspeed.initialize(model=_model(), config=config)[0]
    losses = []
    for step in range(STEPS):
        loss = engine(_batch(step)).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return engine, losses


def test_files_have_the_values_of_each_step(tmp_path: Path) -> None:
    section = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    _, losses = _trained(csv_monitor=section, tensorboard=section)
    with (tmp_path / "job" / "Train_Samples_train_loss.csv").open() as file:
        head, *rows = csv.reader(file)
    assert head == ["step", "train_loss"]
    assert [int(samples) for samples, _ in rows] == [BATCH, 2 * BATCH, 3 * BATCH]
    assert [float(loss) for _, loss in rows] == pytest.approx(losses)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "job"))
    events.Reload()
    assert [event.value for event in events.Scalars("Train/Samples/lr")] == pytest.approx([0.01] * STEPS)


def test_losses_of_steps_whose_boundaries_the_program_sets(tmp_path: Path) -> None:
    """As accelerate does, which calls ``step`` only at boundaries."""
    config = {"train_micro_batch_size_per_gpu": BATCH, "gradient_accumulation_steps": 2}
    config |= {"optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}
    config["csv_monitor"] = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    engine = deepspeed.initialize(model=_model(), config=config)[0]
    means = []
    for step in range(STEPS):
        losses = []
        for is_boundary in (False, True):
            engine.set_gradient_accumulation_boundary(is_boundary)
            loss = engine(_batch(2 * step + is_boundary)).square().mean()
            engine.backward(loss)
            losses.append(loss.item())
        engine.step()
        means.append(sum(losses) / 2)
    with (tmp_path / "job" / "Train_Samples_train_loss.csv").open() as file:
        rows = [*csv.reader(file)][1:]
    assert [float(loss) for _, loss in rows] == pytest.approx(means)


def test_wall_clock_breakdown_logs_each_step(caplog: pytest.LogCaptureFixture) -> None:
    deepspeed.logger.propagate = True
    with caplog.at_level(logging.INFO, logger=deepspeed.logger.name):
        _trained(wall_clock_breakdown=True)
    lines = [record.getMessage() for record in caplog.records if "time (ms)" in record.getMessage()]
    assert len(set(lines)) == STEPS
    assert all(name in line for line in lines for name in ("forward", "backward", "step"))


def test_the_profile_of_a_step(tmp_path: Path) -> None:
    path = tmp_path / "profile"
    engine, _ = _trained(flops_profiler={"enabled": True, "profile_step": 2, "output_file": str(path)})
    assert engine.flops_profiler.flops == 2 * 2 * BATCH * WIDTH * WIDTH
    assert engine.flops_profiler.params == 2 * (WIDTH * WIDTH + WIDTH)
    assert "in step 2" in path.read_text() and "(50.0%)" in path.read_text()
    get_model_profile(_model(), (BATCH, WIDTH), detailed=False, output_file=str(path))
    assert [line.split(":")[0].strip() for line in path.read_text().splitlines()[2:]] == ["Sequential", "Sequential.2"]
    assert get_model_profile(_model(), (BATCH, WIDTH), as_string=False, print_profile=False) == (1024, 512, 144)
    assert get_model_profile(_model(), (BATCH, WIDTH), print_profile=False) == ("1.02 KFLOPs", "512.00 MACs", "144.00")
    assert flops_to_string(3e9) == "3.00 GFLOPs" and flops_to_string(3e9, "M", 0) == "3000 MFLOPs"
    with pytest.raises(ConfigError, match="units='X' must be one of K, M, G and T"):
        flops_to_string(1.0, "X")


def test_autocast_is_torchs() -> None:
    _, losses = _trained(torch_autocast={"enabled": True, "dtype": "bfloat16"}, gradient_clipping=0.0)
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4, weight_decay=0.0)
    for step in range(STEPS):
        with torch.autocast("cpu", torch.bfloat16):
            output = model(_batch(step))
        assert output.dtype == torch.bfloat16
        loss = output.float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert losses[step] == pytest.approx(loss.item(), rel=1e-6)


def test_autocast_of_the_program_has_no_effect_and_is_named(caplog: pytest.LogCaptureFixture) -> None:
    engine, _ = _trained()
    expected = engine.module(_batch(0))
    deepspeed.logger.propagate = True
    with torch.autocast("cpu", torch.bfloat16):
        output = engine(_batch(0))
    assert torch.equal(output, expected)
    messages = [record.getMessage() for record in caplog.records]
    assert any("torch.autocast around the engine's forward has no effect" in text for text in messages)


@pytest.mark.parametrize(
    ("keys", "message"),
    (
        ({"torch_autocast": {"enabled": True}, "bf16": {"enabled": True}}, "torch_autocast.enabled contradicts"),
        ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, "torch_autocast.dtype='float16' is not supported"),
        ({"wall_clock_breakdown": 3}, "wall_clock_breakdown=3 must be true or false"),
        ({"flops_profiler": {"enabled": True, "recompute_fwd_factor": 0.5}}, "recompute_fwd_factor=0.5 is not supp"),
        ({"comet": {"enabled": True}}, "comet.enabled=True is not supported: use tensorboard"),
    ),
)
def test_wrong_values_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        translate({"train_batch_size": 1, **keys}, 1)


@pytest.mark.parametrize("stage", (1, 3))
def test_summary_of_collectives(stage: int) -> None:
    texts, summary = zip(*run_ranks(2, _summarized, stage), strict=True)
    assert "dp reduce_scatter" in texts[0] and "busbw_avg_gbps" in texts[0] and texts[1] == ""
    count = WIDTH * WIDTH + WIDTH
    for rows in summary:
        # Of n ranks each sends (n - 1) / n of the float32 gradients in a reduce-scatter.
        ((size, row),) = rows["dp reduce_scatter"].items()
        sent, padding = STEPS * 4 * 2 * count / 2, 1.2 if stage == 3 else 1.0
        assert sent <= row["count"] * row["msg_size_bytes"] <= sent * padding
        assert size == int(row["msg_size_bytes"]) and row["total_latency_ms"] > 0
        assert row["busbw_avg_gbps"] == pytest.approx(8e-6 * size * row["count"] / row["total_latency_ms"], rel=1e-3)
    assert min(rows["dp reduce_scatter"][size]["total_straggler_ms"] for rows in summary) == 0
    gathers = summary[0]["dp all_gather"].values()
    # At stage 3 the weights are gathered for forward and backward, at stage 1 after each update.
    assert sum(row["count"] for row in gathers) >= STEPS * (2 if stage == 3 else 1)


def _summarized(stage: int) -> tuple[str, Any]:
    zero = {"stage": stage, "overlap_comm": False}
    engine, _ = _trained(train_batch_size=2 * BATCH, comms_logger={"enabled": True}, zero_optimization=zero)
    output = io.StringIO()
    with redirect_stdout(output):
        result = deepspeed.comm.log_summary(show_straggler=True, return_dict=True)
    engine.destroy()
    assert result is not None and result["metadata"]["world_size"] == 2
    return output.getvalue(), result["summary"]
