"""The sinks of a run."""

from __future__ import annotations

from megatron_core.config import MonitorConfig
from megatron_core.monitor import JsonLinesSink, build_sinks
from megatron_core.monitor.console import ConsoleSink
from megatron_core.monitor.tensorboard import TensorBoardSink
from tests.monitor.examples import step, validation


def kinds(sinks) -> list[type]:
    for sink in sinks:
        sink.close()
    return [type(sink) for sink in sinks]


def test_the_console_comes_always_and_the_rest_where_it_has_a_place(tmp_path):
    assert kinds(build_sinks(MonitorConfig())) == [ConsoleSink]
    assert kinds(build_sinks(MonitorConfig(), tmp_path)) == [ConsoleSink, JsonLinesSink]
    assert (tmp_path / "metrics.jsonl").exists()
    config = MonitorConfig(metrics_file=str(tmp_path / "x.jsonl"), tensorboard_dir=str(tmp_path / "tb"))
    assert kinds(build_sinks(config)) == [ConsoleSink, JsonLinesSink, TensorBoardSink]


def test_every_sink_takes_every_event(tmp_path, capsys):
    config = MonitorConfig(log_interval=1, tensorboard_dir=str(tmp_path / "tb"))
    for sink in build_sinks(config, tmp_path):
        sink.on_step(step(1))
        sink.on_validation(validation(1))
        sink.close()
    assert "lm loss" in capsys.readouterr().out
