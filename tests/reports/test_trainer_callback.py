"""Metrics of transformers.Trainer in this project's files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from megatron_core.errors import ConfigError
from megatron_core.reports.metrics import read_metrics
from megatron_core.reports.trainer_callback import MetricsCallback


class Model(nn.Module):
    """A linear regression with its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """The loss."""
        return {"loss": (self.line(x).squeeze(-1) - labels).square().mean()}


def _trainer(folder: Path, **settings: Any) -> transformers.Trainer:
    samples = [{"x": torch.full((4,), float(n)), "labels": torch.tensor(float(n))} for n in range(8)]
    arguments = transformers.TrainingArguments(
        output_dir=str(folder / "out"),
        max_steps=4,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        logging_steps=2,
        eval_strategy="steps",
        eval_steps=4,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        lr_scheduler_type="constant",
        dataloader_pin_memory=False,
    )
    callback = MetricsCallback(**settings)
    return transformers.Trainer(Model(), arguments, train_dataset=samples, eval_dataset=samples, callbacks=[callback])


def test_logs_and_evaluations_are_written(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path, metrics_file=str(tmp_path / "metrics.jsonl"))
    trainer.train()
    logs = [each for each in trainer.state.log_history if "loss" in each]
    steps = list(read_metrics(tmp_path / "metrics.jsonl"))
    validation = [each for each in steps if each["kind"] == "validation"]
    steps = [each for each in steps if each["kind"] == "step"]
    assert [each["iteration"] for each in steps] == [2, 4]
    for step, log in zip(steps, logs, strict=True):
        assert (step["loss"], step["grad_norm"]) == (float(log["loss"]), float(log["grad_norm"]))
        assert step["learning_rate"] == float(log["learning_rate"])
        assert step["consumed_samples"] == 4 * step["iteration"]
        assert abs(step["samples per second"] * step["elapsed_ms"] / 1000.0 - 4.0) < 1e-6
    losses = [each["eval_loss"] for each in trainer.state.log_history if "eval_loss" in each]
    assert [(each["iteration"], each["loss"], each["split"]) for each in validation] == [(4, losses[0], "validation")]


def test_a_foreign_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"notes\.txt"):
        _trainer(tmp_path, metrics_file=str(tmp_path / "notes.txt")).train()
    assert (tmp_path / "notes.txt").read_text() == "mine"
