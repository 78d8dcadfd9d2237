"""The sinks of a run."""

from __future__ import annotations

from megatron_core.config import RunConfig
from megatron_core.monitor.console import ConsoleSink
from megatron_core.monitor.sinks import JsonLinesSink, SinkContext, build_sinks
from megatron_core.reports.metric_sinks import TensorBoardSink
from tests.monitor.examples import step, validation


def kinds(sinks) -> list[type]:
    for sink in sinks:
        sink.close()
    return [type(sink) for sink in sinks]


def configured(**settings) -> RunConfig:
    return RunConfig.from_flat(RunConfig().flat() | settings)


def test_each_sink_is_created_if_it_has_a_destination(tmp_path):
    assert kinds(build_sinks(SinkContext(RunConfig()))) == []
    assert kinds(build_sinks(SinkContext(RunConfig(), tmp_path))) == [JsonLinesSink]
    assert (tmp_path / "metrics.jsonl").exists()
    config = configured(metrics_file=str(tmp_path / "x.jsonl"), tensorboard_dir=str(tmp_path / "tb"))
    assert kinds(build_sinks(SinkContext(config))) == [JsonLinesSink, TensorBoardSink]


def test_every_sink_takes_every_event(tmp_path, capsys):
    config = configured(log_interval=1, tensorboard_dir=str(tmp_path / "tb"))
    for sink in [ConsoleSink.of(config.monitor), *build_sinks(SinkContext(config, tmp_path))]:
        sink.on_step(step(1))
        sink.on_validation(validation(1))
        sink.close()
    assert "loss" in capsys.readouterr().out
