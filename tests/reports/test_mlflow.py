"""Runs recorded by MLflow, in a file."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

from megatron_core.errors import ConfigError
from megatron_core.monitor.sinks import LenientSink
from megatron_core.reports.metric_sinks import MlflowSink
from tests.monitor.examples import sink_context, step, validation


def test_a_run_with_its_settings_steps_and_evaluations(tmp_path: Path) -> None:
    import mlflow  # takes a second

    logged = {f"s{n}": n for n in range(150)} | {"long": "x" * 9000}
    for _ in range(2):  # the second run finds the experiment
        sink = MlflowSink(sink_context(tmp_path, logged, mlflow_experiment="e", mlflow_run_name="r"))
        sink.on_step(step(3, loss=2.5, grad_norm=None, breakdown={"grad-norm by layer/layer 0": math.nan}))
        sink.on_validation(validation(3, loss=0.0))
        sink.close()
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    (experiment,) = client.search_experiments(filter_string="name = 'e'")
    runs = client.search_runs([experiment.experiment_id])
    assert len(runs) == 2 and {run.info.status for run in runs} == {"FINISHED"}
    assert runs[0].info.run_name == "r" and len(runs[0].data.params) == 151
    metrics = runs[0].data.metrics
    assert metrics["lm loss"] == 2.5 and metrics["lm loss validation ppl"] == 1.0 and "grad-norm" not in metrics
    assert math.isnan(metrics["grad-norm by layer/layer 0"])
    assert [point.step for point in client.get_metric_history(runs[0].info.run_id, "lm loss")] == [3]


def test_without_the_package_it_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(ConfigError, match="mlflow_experiment=e needs the package mlflow; pip install mlflow-skinny"):
        MlflowSink(sink_context(None, {}, mlflow_experiment="e"))


def test_a_training_survives_a_store_that_fails(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    lenient = LenientSink(MlflowSink(sink_context(tmp_path, {}, mlflow_experiment="e")))
    (tmp_path / "mlflow.db").write_text("no database any more" * 1000)
    lenient.on_validation(validation(3, loss=0.0))
    lenient.close()
    assert capsys.readouterr().err.count("mlflow_experiment cannot be written") == 1


@pytest.mark.parametrize("store", ["{}/mlruns", "bad://x", "http://127.0.0.1:9", "\0"])
def test_a_store_that_cannot_be_used_is_one_sentence(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    uri = store.format(f"file://{tmp_path}")
    with pytest.raises(ConfigError, match=r"mlflow_tracking_uri=.* mlflow_experiment=e: MLflow cannot start") as error:
        MlflowSink(sink_context(tmp_path, {}, mlflow_experiment="e", mlflow_tracking_uri=uri))
    assert "\n" not in str(error.value)
