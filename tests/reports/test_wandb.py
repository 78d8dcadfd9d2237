"""Data sent to Weights & Biases, recorded by a stand-in for its package."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_core.errors import ConfigError
from megatron_core.monitor.events import ValidationEvent
from megatron_core.reports.metric_sinks import WandbSink
from tests.monitor.examples import sink_context, step


def test_a_run_with_its_settings_steps_and_evaluations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, Any]] = []
    run = SimpleNamespace(
        log=lambda values, step: calls.append(("log", (values, step))), finish=lambda: calls.append(("finish", None))
    )
    monkeypatch.setitem(
        sys.modules, "wandb", SimpleNamespace(init=lambda **given: calls.append(("init", given)) or run)
    )
    sink = WandbSink(sink_context(tmp_path, {"lr": 0.1}, wandb_project="p", wandb_exp_name="e", wandb_entity="us"))
    sink.on_step(step(3, loss=2.5, grad_norm=None))
    sink.on_validation(ValidationEvent(iteration=3, loss=0.0))
    sink.close()
    (_, given), (_, (values, at)), (_, (evaluated, _)), last = calls
    assert given == {"project": "p", "name": "e", "entity": "us", "dir": str(tmp_path / "wandb"), "config": {"lr": 0.1}}
    assert (values["lm loss"], at) == (2.5, 3) and "grad-norm" not in values
    assert evaluated == {"lm loss validation": 0.0, "lm loss validation ppl": 1.0} and last == ("finish", None)
    assert (tmp_path / "wandb").is_dir()


def test_without_the_package_it_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="wandb_project=p needs the package wandb; pip install wandb"):
        WandbSink(sink_context(None, {}, wandb_project="p"))


def test_offline_files_of_the_package_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    sink = WandbSink(sink_context(tmp_path, {"lr": 0.1}, wandb_project="p"))
    sink.on_step(step(3))
    sink.close()
    assert len(list((tmp_path / "wandb").rglob("run-*.wandb"))) == 1


def test_without_a_login_it_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**settings: object) -> None:
        raise RuntimeError("\nNo API key configured. Use `wandb login` to log in.\nmore")  # as wandb's UsageError

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    with pytest.raises(ConfigError, match=r"wandb_project=p: .* cannot start a run \(No API key.* WANDB_MODE=offline"):
        WandbSink(sink_context(None, {}, wandb_project="p"))
